"""Calls of a known layout, and what reaches the CUDA driver, without a GPU: test_gpu.py shows them on one.

Launches are stood in for by a function that reads and writes memory at the addresses it is given, by eager's rule.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import spec_verify_xpu as sv
from batches import random_batch
from spec_verify_xpu import eager, repeats

pytest.importorskip("triton")

from spec_verify_xpu.gpu import handles, launch


@pytest.fixture(autouse=True)
def on_cpu(device):
    if device.type != "cpu":
        pytest.skip("test_gpu.py has the like")


@pytest.fixture
def launched(monkeypatch):
    """A list that grows with each repeated call, whatever its implementation. What is allocated is poisoned."""
    calls = []

    def empty(size, stride, dtype):
        return torch._C._dynamo.guards._empty_strided_cpu(size, stride, dtype).fill_(-77)

    def kept(call):
        given = {name: x for name, x in call.tensors().items() if x is not None}

        def run(addresses):
            calls.append(addresses)
            eager.verify(call._replace(**{name: at(address, x) for (name, x), address in zip(given.items(), addresses)}))

        return 10, 0, launch.is_aligned(call) if launch.can_be_aligned(call) else None, run

    monkeypatch.setattr(repeats, "known", {})
    monkeypatch.setitem(repeats.EMPTY, "cpu", empty)
    monkeypatch.setattr(repeats, "implementation", lambda *_: SimpleNamespace(kept=kept))
    return calls


def at(address, like):
    """The tensor at an address, contiguous, of another's shape and dtype."""
    memory = (ctypes.c_byte * (like.numel() * like.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def same(result, expected):
    return [x.tolist() for x in result] == [x.tolist() for x in expected]


@pytest.fixture
def inputs():
    """Of 3 sequences, an odd number: outputs that share an allocation begin at 16 bytes all the same."""
    return [x.contiguous() for x in random_batch(3, 4, 64)[:5]]


def test_repeated_calls_see_what_tensors_hold(inputs, launched):
    for _ in range(4):
        result = sv.verify(*inputs, impl="eager")
        assert same(result, sv.verify(*inputs, impl="reference"))
        assert all(x.data_ptr() % 16 == 0 for x in result)
        inputs[2].copy_(inputs[2].flip(-1))
    assert len(launched) == 3 + 3  # eager's and the reference's, which are told apart


def test_every_option_is_repeated(inputs, launched):
    numbers = torch.arange(3)
    flat, ends = [x.flatten(0, 1) for x in inputs[:3]], torch.arange(4) * 4
    rows, seeds = flat[1].flip(0), {"seed": numbers, "offset": numbers + 9}
    own = {"draft_slots": numbers * 2, "draft_temperature": numbers / 2}
    calls = {
        "dtype": lambda impl: sv.verify(*inputs, dtype=torch.int32, impl=impl),
        "one_hot": lambda impl: sv.verify(inputs[0], None, *inputs[2:], lengths=numbers, impl=impl),
        "seeds": lambda impl: sv.verify(*inputs[:3], **seeds, impl=impl),
        "ragged": lambda impl: sv.verify_varlen(*flat, ends, 4, **seeds, greedy=numbers == 1, impl=impl),
        "bonus": lambda impl: sv.verify_varlen(*flat[:2], rows, ends, 4, **seeds, bonus_tokens=numbers - 7, impl=impl),
        "slots": lambda impl: sv.verify_logits(*inputs, temperature=numbers / 3, **own, impl=impl),
        "ragged_slots": lambda impl: sv.verify_logits_varlen(flat[0], inputs[1], flat[2], ends, 4, **seeds, **own, impl=impl),
    }
    for call in calls.values():
        expected = call("reference")
        for _ in range(3):
            assert same(call("eager"), expected)
    assert len(launched) == 2 * len(calls)


@pytest.mark.parametrize("kind", [tuple, list, lambda x: sv.VerifyResult(*x)], ids=["tuple", "list", "result"])
@pytest.mark.parametrize("names", ["", "emitted", "num_emitted", "num_emitted emitted"])
def test_outputs_that_are_brought(kind, names, inputs, launched):
    """Every pair that the validation takes is written and returned, and counts as written; also what is asked for beside it."""
    expected = sv.verify(*inputs, impl="reference")
    out = kind([torch.empty(3, dtype=torch.int32) for _ in range(2)])
    wanted = {"num_emitted": expected.accepted + 1, "emitted": sv.emit(inputs[0], *expected)}
    more = {name: torch.empty_like(wanted[name]) for name in names.split()}
    for count in range(3):
        written = *out, *more.values()
        for x in written:
            x.fill_(-7)
        versions = [x._version for x in written]
        result = sv.verify(*inputs, out=out, **more, impl="eager")
        assert result[0] is out[0] and result[1] is out[1] and same(result, expected) and len(launched) == count
        assert all(x._version > before for x, before in zip(written, versions))
        assert all(torch.equal(x, wanted[name]) for name, x in more.items())


def test_what_is_wrong_is_refused_after_a_call_that_was_right(inputs, launched):
    flat, ends = [x.flatten(0, 1) for x in inputs[:3]], torch.arange(4) * 4
    seed, pair = torch.arange(3), [torch.empty(3, dtype=torch.int64) for _ in range(2)]
    for _ in range(2):
        sv.verify(*inputs, impl="eager")
        sv.verify(*inputs, out=tuple(pair), impl="eager")
        sv.verify_varlen(*flat, ends, 1, seed=seed, impl="eager")
    for out in (3, torch.empty(2, 3), (None, None), pair[:1], [*pair, None], (pair[0], pair[0])):
        with pytest.raises((TypeError, ValueError), match=r"^out"):
            sv.verify(*inputs, out=out, impl="eager")
    for max_drafts in (True, 1.0, torch.tensor(1)):
        with pytest.raises(TypeError, match=r"^max_drafts"):
            sv.verify_varlen(*flat, ends, max_drafts, seed=seed, impl="eager")
    with pytest.raises(TypeError, match=r"^lengths"):
        sv.verify(*inputs, lengths=seed.numpy(), impl="eager")
    with pytest.raises(ValueError, match=r"^impl"):
        sv.verify(*inputs, impl="nonsense")


def test_traces_see_the_operator(inputs, launched):
    """Modes that hide from torch's compiler, and so from its guards, and functorch's transforms."""
    for _ in range(2):
        sv.verify(*inputs, impl="eager")
    before = len(launched)
    graph = make_fx(lambda *x: tuple(sv.verify(*x, impl="eager")))(*inputs).graph
    assert any("verify" in str(node.target) for node in graph.nodes)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(sv.verify(*inputs, impl="eager").accepted) is not torch.Tensor

    def loss(target):
        return (target * sv.verify(*inputs[:2], target, *inputs[3:], impl="eager").accepted[:, None, None]).sum()

    assert torch.func.grad(loss)(inputs[2]).shape == inputs[2].shape
    assert len(launched) == before


def test_alignment_is_part_of_the_layout(inputs, launched):
    """A call off its alignment does not stand for those on it, nor the other way round."""
    moved = torch.empty(inputs[2].numel() + 1)[1:].view(inputs[2].shape).copy_(inputs[2])
    shifted, expected = [*inputs[:2], moved, *inputs[3:]], sv.rule.verify(*inputs)
    for batch in (inputs, shifted, inputs, shifted):
        assert [x.tolist() for x in sv.verify(*batch, impl="eager")] == list(expected)
    assert len(launched) == 2 and len(repeats.known[inputs[2].shape]) == 2


def test_nothing_is_kept_of_calls_that_cannot_be_repeated(inputs, launched):
    """One tensor as two arguments, which the guards refuse; uniforms drawn in the call; numbers that are made tensors."""
    numbers = torch.arange(3)
    for _ in range(3):
        sv.verify(*inputs[:3], seed=numbers, offset=numbers, impl="eager")
        sv.verify(*inputs[:3], impl="eager")
        sv.verify(*inputs[:3], seed=3, impl="eager")
        sv.verify_logits(*inputs, draft_temperature=0.5, impl="eager")
    assert not launched and not repeats.known


def test_what_is_known_is_bounded(launched, monkeypatch):
    monkeypatch.setattr(repeats, "MOST_KNOWN", 3)
    for V in range(16, 16 * 8, 16):
        sv.verify(*random_batch(2, 2, V)[:5], impl="eager")
    assert len(repeats.known) <= 3
    batch = random_batch(2, 2, 16)
    for dtype in (torch.int32, torch.int64):
        for x in (batch, batch._replace(lengths=torch.tensor([1, 2])), batch._replace(draft_probs=None)):
            for tokens in (torch.int32, torch.int64):
                sv.verify(x.draft_tokens.to(tokens), *x[1:5], lengths=x.lengths, dtype=dtype, impl="eager")
    assert max(len(runs) for runs in repeats.known.values()) == 8


NEGATIVE = pytest.param(lambda x: torch.complex(x, -x).conj().imag, id="negative")
ZEROS = pytest.param(lambda x: torch._efficientzerotensor(x.shape), id="zeros")


@pytest.mark.parametrize("like", [NEGATIVE, ZEROS])
def test_tensors_that_are_not_what_their_memory_holds(like, inputs, launched):
    """torch's dispatcher makes others of them, and addresses know nothing of that."""
    accept, sample = (torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) for x in inputs[3:5])
    inputs = (*inputs[:3], like(accept), sample)
    expected = sv.verify(*inputs, impl="eager")
    assert all(same(sv.verify(*inputs), expected) for _ in range(3)) and not launched


@pytest.mark.parametrize("B, T", [(0, 2), (2, 0), (2, 2)], ids=["no_sequences", "no_drafts", "some"])
def test_batches_without_anything_to_launch_are_not_kept(B, T, monkeypatch):
    """Their grids would be empty, or a kernel would get rows that are not there, though launches of their dtypes are kept."""

    class Kept(dict):
        def get(self, key):
            return SimpleNamespace(run=print)

    monkeypatch.setattr(launch, "kept_launches", Kept())
    monkeypatch.setattr(launch, "device_facts", lambda _: launch.DeviceFacts(keeps=True))
    ends, numbers = torch.arange(B + 1) * (T // 2), torch.arange(B)
    rows = torch.zeros(T, dtype=torch.int64), torch.rand(T, 16), torch.rand(T + B, 16)
    inputs = *rows, None, None, numbers, numbers + 1, None, ends, None, None, None, None, None
    call = sv.api.ragged_call(inputs, False, 1.0, 2, None, torch.int64, None, None, None, "eager")
    assert bool(launch.kept(call)) == (B * T > 0)


class Driver:
    """Stands in for the CUDA driver: notes what it is called with, by its own structures, and answers with `errors`, then 0."""

    def __init__(self, counts, errors=()):
        self.seen, self.counts, self.errors = [], counts, list(errors)
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self.launch)

    def launch(self, config, function, parameters, extra):
        numbers = (ctypes.c_uint * 7).from_address(config)  # grid, block, shared memory; at 32 bytes the stream, and attributes
        stream, attributes = (ctypes.c_void_p * 2).from_address(config + 32)
        count = ctypes.c_uint.from_address(config + 48).value
        attribute = [ctypes.c_int.from_address(attributes + i).value for i in (0, 8)] if count else None
        pointers = (ctypes.c_void_p * self.counts[function]).from_address(parameters)
        values = [ctypes.c_int64.from_address(x).value for x in pointers]
        self.seen.append((function, list(numbers), stream, attribute, values, extra))
        return self.errors.pop(0) if self.errors else 0


@pytest.fixture
def keep(monkeypatch):
    """A function of a driver: two launches, and what is kept of them."""

    def keep(driver):
        monkeypatch.setattr(handles, "driver", lambda: driver)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
        launches = [
            handles.Launch("first", ("a", "absent", "b"), (2, 3, 1), (5, -6, 2**40), (), {}),
            handles.Launch("second", ("b", "c"), (4, 1, 1), (7,), (), {}),
        ]
        kernels = [
            SimpleNamespace(function=function, metadata=SimpleNamespace(num_warps=warps, shared=shared, launch_pdl=pdl))
            for function, warps, shared, pdl in ((1001, 2, 0, False), (1002, 4, 32, True))
        ]
        kept = handles.KeptLaunches(list(zip(launches, kernels)), ["a", "b", "c"], torch.device("cuda", 1))
        return handles.numbers_of(launches), kept

    return keep


def test_what_reaches_the_driver(keep):
    """Grids, warps, streams, overlapped launches, and each kernel's own parameters: addresses, integers, two zeros."""
    driver = Driver({1001: 2 + 3 + 2, 1002: 2 + 1 + 2})
    numbers, kept = keep(driver)
    kept.run(numbers, [11, 22, 33])
    assert driver.seen == [
        (1001, [2, 3, 1, 64, 1, 1, 0], 71, None, [11, 22, 5, -6, 2**40, 0, 0], None),
        (1002, [4, 1, 1, 128, 1, 1, 32], 71, [6, 1], [22, 33, 7, 0, 0], None),
    ]
    others = [(9, 1, 1), (8, 1, 1)], [1, 2, 3, 4]
    for given in (others, others, numbers):
        kept.run(given, [44, 55, 66])
    assert [x[1][0] for x in driver.seen[2:]] == [9, 8, 9, 8, 2, 4]
    changed = [[44, 55, 1, 2, 3, 0, 0], [55, 66, 4, 0, 0]]
    assert [x[4] for x in driver.seen[2:]] == [*changed, *changed, [44, 55, 5, -6, 2**40, 0, 0], [55, 66, 7, 0, 0]]


def test_a_thread_that_is_new_to_the_device(keep, monkeypatch):
    made_current = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    driver = Driver({1001: 7, 1002: 5}, errors=[handles.NO_CONTEXT])
    numbers, kept = keep(driver)
    kept.run(numbers, [1, 2, 3])
    assert made_current == [1] and [x[0] for x in driver.seen] == [1001, 1001, 1002]


def test_an_error_of_the_driver_is_raised(keep):
    numbers, kept = keep(Driver({1001: 7, 1002: 5}, errors=[0, 700]))
    with pytest.raises(RuntimeError, match="could not launch a kernel: error 700"):
        kept.run(numbers, [1, 2, 3])


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_seen(hook, monkeypatch):
    triton = pytest.importorskip("triton")
    assert not handles.is_hooked()
    for value, is_hooked in ((None, False), (lambda metadata: None, True)):
        hooks = {"launch_enter_hook": None, "launch_exit_hook": None, hook: value}
        monkeypatch.setattr(triton, "knobs", SimpleNamespace(runtime=SimpleNamespace(**hooks)))
        assert handles.is_hooked() is is_hooked
