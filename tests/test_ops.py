"""The operator: its registrations, its fake, tracing, and what surrounds a call (grad, autocast, devices, threads of torch)."""

import contextlib

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import spec_verify_xpu as sv
from batches import Batch, as_ragged, random_batch, with_bonus
from spec_verify_xpu._ops import ops
from spec_verify_xpu.rule import DRAW, SAMPLE


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()  # which compiles one function for eight shapes at most


@pytest.fixture
def batch(device):
    return random_batch(3, 4, 64)._replace(lengths=torch.tensor([4, 2, 0])).to(device)


@pytest.mark.parametrize("key", ["CPU", "CUDA", "XPU"])
@pytest.mark.parametrize("op", [ops.verify, ops.emit], ids=["verify", "emit"])
def test_registered_for_each_device(op, key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.default.name(), key)


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
@pytest.mark.parametrize(
    "chance, logits",
    [("uniforms", False), ("seeds", False), ("neither", False), ("uniforms", True), ("seeds", True)],
    ids=["uniforms", "seeds", "neither", "uniforms-logits", "seeds-logits"],
)
@pytest.mark.parametrize("given", [True, False], ids=["all", "none"])
def test_opcheck(batch, ragged, chance, given, logits, impl, device):
    """Schema, fake, autograd registration and dynamic tracing, with every optional argument given and left out."""
    bonus_tokens = torch.arange(3, device=device) if given and chance != "neither" else None
    batch = batch if bonus_tokens is None else with_bonus(batch)
    source = as_ragged(batch) if ragged else batch
    accept, sample = (source.uniform_accept, source.uniform_sample) if chance == "uniforms" else (None, None)
    seeds = (torch.arange(3, device=device), torch.arange(3, device=device)) if chance == "seeds" else (None, None)
    lengths = batch.lengths if given and not ragged else None
    greedy = torch.tensor([True, False, True], device=device) if given and chance != "neither" else None
    temperature = torch.tensor([1.0, 0.7, 0.0], device=device) if logits and given else None
    own = (
        (torch.tensor([2, 0, 2], device=device), torch.tensor([0.5, 2.0, 0.0], device=device))
        if logits and given
        else (None,) * 2
    )
    draft = (batch if logits else source).draft_probs if given else None
    outputs = [torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2)]
    torch.library.opcheck(
        ops.verify.default,
        (
            source.draft_tokens, draft, source.target_probs, accept, sample, *seeds, SAMPLE,
            lengths, source.cu_drafts if ragged else None, 4, greedy, bonus_tokens, logits, temperature, 1.0, *own,
            outputs[0].clone() if given else None,
            torch.zeros(3, 5, dtype=torch.int32, device=device) if given else None, *outputs, impl,
        ),
    )  # fmt: skip


def test_opcheck_of_the_others(batch, impl, device):
    """`sample` and `sample_logits` as they call the operator, and `emit`."""
    none, *outputs, seeds = (torch.zeros(n, dtype=torch.int64, device=device) for n in ((3, 0), 3, 3, 3))
    rows = none, None, batch.target_probs[:, :1]
    for more in ((False, None, 1.0), (True, None, 0.5), (True, torch.ones(3, device=device), 1.0)):
        arguments = (
            *rows,
            None,
            None,
            seeds,
            seeds.clone(),
            DRAW,
            None,
            None,
            0,
            None,
            None,
            *more,
            *[None] * 4,
            *outputs,
            impl,
        )
        torch.library.opcheck(ops.verify.default, arguments)
    torch.library.opcheck(ops.emit.default, (batch.draft_tokens, *outputs, -1, torch.zeros_like(batch.uniform_sample), impl))


def fake_results(kind):
    """Each function's result, in the shapes that it has for B = 3, K = 4 and T = 6."""

    def ids(*shape):
        return torch.empty(shape, dtype=torch.int64, device=kind)

    def probs(*shape):
        return torch.empty(*shape, 9, device=kind)

    temperature = torch.empty(3, device=kind)
    return [
        *sv.verify(ids(3, 4), probs(3, 4), probs(3, 5), ids(3, 4), ids(3, 5)),
        *sv.verify(ids(3, 4), None, probs(3, 5), seed=ids(3), greedy=ids(3) > 0),
        *sv.verify_varlen(ids(6), probs(6), probs(9), ids(4), 4, seed=1, offset=ids(3)),
        *sv.verify_greedy(ids(3, 4), probs(3, 5), lengths=ids(3)),
        *sv.verify_logits(ids(3, 4), probs(3, 4), probs(3, 5), temperature=0.7),
        *sv.verify_logits_varlen(ids(6), probs(6), probs(9), ids(4), 4, seed=1, temperature=temperature),
        *sv.verify_logits_varlen(ids(6), probs(6), probs(6), ids(4), 4, seed=1, bonus_tokens=ids(3)),
        *sv.verify_logits(ids(3, 4), probs(5, 6), probs(3, 5), draft_slots=ids(3), draft_temperature=0.7),
        *sv.verify_logits_varlen(
            *(ids(6), probs(5, 4), probs(9), ids(4), 4), seed=1, draft_slots=ids(3), draft_temperature=temperature
        ),
        sv.sample_logits(probs(3), seed=1, temperature=0.7),
        sv.sample(probs(3), seed=1),
        sv.sample(probs(3, 5), ids(3, 5)),
        sv.emit(ids(3, 4), ids(3), ids(3)),
    ]


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu"])
def test_fake_on_any_device(kind, device):
    """Shapes, dtypes and devices are known without the device. A GPU build of torch makes fakes of its own GPU only."""
    if device.type not in ("cpu", kind):
        pytest.skip(f"a {device.type} build of torch")
    with FakeTensorMode(allow_non_fake_inputs=False):
        results = fake_results(kind)
    assert [tuple(x.shape) for x in results] == [(3,)] * 20 + [(3, 5)] * 2
    assert {(x.dtype, x.device.type) for x in results} == {(torch.int64, kind)}


def steps(impl):
    """Each public function as one of a dense batch that returns a list of tensors."""

    def verify(batch):
        return [*sv.verify(*batch[:5], lengths=batch.lengths, impl=impl)]

    def seeded(batch):
        seed = torch.arange(batch.draft_tokens.shape[0], device=batch.draft_tokens.device)
        return [*sv.verify(*batch[:3], seed=seed, offset=-1, greedy=seed % 2 == 0, dtype=torch.int32, impl=impl)]

    def verify_varlen(batch):
        rows = batch.target_probs.flatten(0, 1)  # every sequence of K drafts
        B, K = batch.draft_tokens.shape
        cu_drafts = torch.arange(B + 1, device=rows.device) * K
        drafts = batch.draft_tokens.flatten(), batch.draft_probs.flatten(0, 1)
        return [*sv.verify_varlen(*drafts, rows, cu_drafts, K, *(x.flatten() for x in batch[3:5]), impl=impl)]

    def given_bonus(batch):
        rows, greedy = batch.target_probs[:, :-1], batch.lengths % 2 == 0
        options = {"lengths": batch.lengths, "greedy": greedy, "bonus_tokens": batch.lengths - 9, "impl": impl}
        return [*sv.verify(*batch[:2], rows, *batch[3:5], **options), *sv.verify_logits(*batch[:2], rows, seed=1, **options)]

    def verify_greedy(batch):
        return [*sv.verify_greedy(batch.draft_tokens, batch.target_probs, impl=impl)]

    def sample(batch):
        return [sv.sample(batch.target_probs, **x, impl=impl) for x in ({"uniform": batch.uniform_sample}, {"seed": 2})]

    def verify_logits(batch):
        temperature = torch.arange(batch.draft_tokens.shape[0], device=batch.target_probs.device) / 2
        return [*sv.verify_logits(*batch[:5], temperature=temperature, lengths=batch.lengths, impl=impl)]

    def by_slot(batch):
        slots, rows = batch.lengths - 1, batch.target_probs.flatten(0, 1)
        seeds = {"seed": slots, "draft_slots": slots, "draft_temperature": batch.lengths / 2, "impl": impl}
        cu_drafts = torch.arange(slots.shape[0] + 1, device=rows.device) * batch.draft_tokens.shape[1]
        ragged = batch.draft_tokens.flatten(), batch.draft_probs, rows, cu_drafts, 4
        return [*sv.verify_logits(*batch[:3], **seeds), *sv.verify_logits_varlen(*ragged, **{**seeds, "draft_temperature": 2})]

    def sample_logits(batch):
        return [sv.sample_logits(batch.target_probs, batch.uniform_sample, temperature=0.7, impl=impl)]

    def emit(batch):
        return [sv.emit(batch.draft_tokens, batch.lengths, batch.lengths + 1, impl=impl)]

    def outputs(batch):
        B, K = batch.draft_tokens.shape
        out = torch.zeros_like(batch.lengths), torch.zeros_like(batch.lengths, dtype=torch.int32)
        more = {"num_emitted": torch.zeros_like(batch.lengths), "emitted": batch.draft_tokens.new_zeros(B, K + 1)}
        return [*sv.verify(*batch[:5], out=out, **more, impl=impl), *out, *more.values()]

    def metrics(batch):
        accepted, next_token = sv.verify(*batch[:5], lengths=batch.lengths, impl=impl)
        emitted = sv.emit(batch.draft_tokens, accepted, next_token, impl=impl)
        return [*sv.statistics(accepted, batch.lengths, 4), sv.logprobs(emitted, batch.target_probs)]

    verifiers = verify, seeded, verify_varlen, given_bonus, verify_greedy, verify_logits, by_slot
    return *verifiers, sample, sample_logits, emit, outputs, metrics


STEPS = [step.__name__ for step in steps("auto")]


def step_of(name, impl):
    return steps(impl)[STEPS.index(name)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", STEPS)
def test_compile_fullgraph(batch, name, impl, backend):
    """What comes behind the call in the graph sees what it wrote."""
    step = step_of(name, impl)
    compiled = torch.compile(lambda batch: [x + 1 for x in step(batch)], fullgraph=True, backend=backend)
    expected = step(batch)
    for _ in range(2):
        results = compiled(batch)
        assert all(x.dtype == y.dtype and torch.equal(x, y + 1) for x, y in zip(results, expected))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_write_the_callers_tensors(batch, impl, backend, device):
    """out= and emitted=, of rows that are apart, given to the graph from outside."""
    framed = torch.full((3, 7), 77, dtype=torch.int32, device=device)
    out = tuple(torch.full((3,), 77, dtype=torch.int64, device=device) for _ in range(2))
    tokens = torch.full((3, 5), 77, dtype=torch.int64, device=device)

    def step(batch, out, emitted, tokens):
        sv.verify(*batch[:5], out=out, emitted=emitted, impl=impl)
        sv.sample(batch.target_probs, batch.uniform_sample, out=tokens, impl=impl)
        sv.emit(batch.draft_tokens, *out, out=emitted, impl=impl)
        return out[0] + 1

    plus_one = torch.compile(step, fullgraph=True, backend=backend)(batch, out, framed[:, 1:-1], tokens)
    expected = batch._replace(lengths=None).verify(impl)
    assert torch.equal(torch.stack(out), torch.stack(expected)) and torch.equal(plus_one, out[0] + 1)
    assert torch.equal(framed[:, 1:-1].long(), sv.emit(batch.draft_tokens, *expected)) and (framed[:, [0, -1]] == 77).all()
    assert torch.equal(tokens, sv.sample(batch.target_probs, batch.uniform_sample))


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


@pytest.mark.parametrize("name", STEPS)
def test_compile_dynamic_shapes_compile_once(name, device):
    """Batch and vocabulary change without another graph."""
    counter = torch._dynamo.testing.CompileCounter()
    step = step_of(name, "auto")
    compiled = torch.compile(lambda *tensors: step(Batch(*tensors)), fullgraph=True, backend=counter, dynamic=True)
    for B, V in ((3, 64), (5, 100), (7, 33)):
        batch = random_batch(B, 4, V)._replace(lengths=torch.arange(B) % 5).to(device)
        assert all(map(torch.equal, compiled(*batch), step(batch)))
    assert counter.frame_count == 1


def test_compile_ragged_batches_compile_once(device):
    """As an engine has them: each step has other lengths, and so another number of drafts."""
    counter = torch._dynamo.testing.CompileCounter()

    def step(*tensors):
        emitted = tensors[0].new_empty(tensors[3].shape[0] - 1, 5)
        return [*sv.verify_varlen(*tensors[:4], 4, *tensors[4:], emitted=emitted), emitted]

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for B, V in ((4, 64), (5, 100), (9, 33)):
        ragged = as_ragged(random_batch(B, 4, V)._replace(lengths=torch.arange(B) % 5)).to(device)
        tensors = *ragged[:4], *ragged[5:7]
        assert all(map(torch.equal, compiled(*tensors), step(*tensors)))
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


def test_outputs_count_as_written(batch, impl):
    """Autograd refuses a backward pass through an index that a later call has overwritten."""
    out = tuple(torch.zeros(3, dtype=torch.int64, device=batch.target_probs.device) for _ in range(2))
    x = torch.rand(3, 64, device=batch.target_probs.device, requires_grad=True)
    chosen = x.exp().gather(1, sv.verify(*batch[:5], out=out, impl=impl).next_token[:, None])
    sv.verify(*batch[:5], out=out, impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chosen.sum().backward()
    sv.emit(batch.draft_tokens, *out, out=(tokens := torch.empty(3, 5, dtype=torch.int64, device=x.device)), impl=impl)
    assert tokens._version > 0
