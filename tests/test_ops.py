"""The operator: its registrations, its fake, tracing, and what surrounds a call (grad, autocast, devices, threads of torch)."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import spec_verify_xpu as sv
from batches import random_batch
from spec_verify_xpu._ops import ops

OP = ops.verify.default


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()  # which compiles one function for eight shapes at most


@pytest.fixture
def batch(device):
    return random_batch(3, 4, 64)._replace(lengths=torch.tensor([4, 2, 0])).to(device)


@pytest.mark.parametrize("key", ["CPU", "CUDA", "XPU"])
def test_registered_for_each_device(key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(OP.name(), key)


@pytest.mark.parametrize("draft", [True, False], ids=["probs", "one_hot"])
@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "full"])
def test_opcheck(batch, draft, lengths, impl):
    """Schema, fake, autograd registration and dynamic tracing, with every optional argument given and left out."""
    arguments = (batch[0], batch[1] if draft else None, *batch[2:5], batch.lengths if lengths else None, impl)
    torch.library.opcheck(OP, arguments)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu"])
def test_fake_on_any_device(kind, device):
    """Shapes, dtypes and devices are known without the device. A GPU build of torch makes fakes of its own GPU only."""
    if device.type not in ("cpu", kind):
        pytest.skip(f"a {device.type} build of torch")
    with FakeTensorMode(allow_non_fake_inputs=False):
        batch = random_batch_of_nothing(kind)
        result = sv.verify(*batch)
    assert [(x.shape, x.dtype, x.device.type) for x in result] == [((3,), torch.int64, kind)] * 2


def random_batch_of_nothing(kind):
    shapes = [((3, 4), torch.int64), ((3, 4, 9), None), ((3, 5, 9), None), ((3, 4), None), ((3, 5), None)]
    return [torch.empty(shape, dtype=dtype or torch.float32, device=kind) for shape, dtype in shapes]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_fullgraph(batch, impl, backend, device):
    def step(*arguments):
        result = sv.verify(*arguments, lengths=batch.lengths, impl=impl)
        return result.accepted + 1, result.next_token

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    accepted, next_token = compiled(*batch[:5])
    expected = batch.verify(impl)
    assert torch.equal(accepted, expected.accepted + 1) and torch.equal(next_token, expected.next_token)


def test_compile_draws_fresh_uniforms_inside(device):
    """None without a generator traces, and two calls of the compiled function differ."""
    big = random_batch(200, 4, 64).to(device)
    compiled = torch.compile(lambda *x: sv.verify(*x), fullgraph=True, backend="aot_eager")
    first, second = (torch.stack(compiled(*big[:3])) for _ in range(2))
    assert not torch.equal(first, second)


def test_compile_never_ignores_a_generator(device):
    """torch cannot trace one: an error where the graph must be whole, and the generator's own numbers where it may break."""
    batch = random_batch(200, 4, 64).to(device)
    generator = torch.Generator(device)

    def step(*x):
        return torch.stack(sv.verify(*x, generator=generator, impl="eager"))

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, fullgraph=True, backend="eager")(*batch[:3])
    compiled = torch.compile(step, backend="eager")
    results = []
    for call in (step, compiled, compiled):
        generator.manual_seed(3)
        results.append(call(*batch[:3]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_compile_dynamic_shapes_compile_once(device):
    """Batch and vocabulary change without another graph."""
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda *x: sv.verify(*x), fullgraph=True, backend=counter, dynamic=True)
    for B, V in ((3, 64), (5, 100), (7, 33)):
        batch = random_batch(B, 4, V).to(device)
        assert torch.equal(torch.stack(compiled(*batch[:5])), torch.stack(batch.verify("auto")))
    assert counter.frame_count == 1


def test_inputs_that_require_grad_are_data(batch, impl):
    wants_grad = batch._replace(
        draft_probs=batch.draft_probs.requires_grad_(), target_probs=batch.target_probs.requires_grad_()
    )
    result = wants_grad.verify(impl)
    assert not any(x.requires_grad for x in result)
    with torch.inference_mode():
        assert torch.equal(torch.stack(batch.verify(impl)), torch.stack(result))


def test_autocast_changes_nothing(batch, impl, device):
    expected = torch.stack(batch.verify(impl))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(torch.stack(batch.verify(impl)), expected)


def test_result_is_a_named_tuple(batch, impl):
    result = batch.verify(impl)
    assert isinstance(result, sv.VerifyResult) and result._fields == ("accepted", "next_token")
    assert [(x.shape, x.dtype) for x in result] == [((3,), torch.int64)] * 2


@pytest.mark.parametrize("current, guarded", [(0, True), (1, False)])
def test_launch_on_the_tensors_device(monkeypatch, current, guarded):
    """A stand-in device module: the tensors' device is made current where it is not, and only there."""
    launch = pytest.importorskip("spec_verify_xpu.gpu.launch")
    entered = []

    class Module:
        @staticmethod
        def current_device():
            return current

        @staticmethod
        def device(d):
            entered.append(d)
            return contextlib.nullcontext()

    for kind in ("cuda", "xpu"):
        entered.clear()
        monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
        with launch.on_device(torch.device(kind, 1)):
            pass
        assert entered == ([torch.device(kind, 1)] if guarded else [])
