"""The CPU implementation that Numba compiles: equal to the rule, compiled once, safe from any thread."""

import itertools
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import spec_verify_xpu as sv
from batches import HOSTILE, Batch, any_ragged, hostile_batch, moved, random_batch, with_bonus
from spec_verify_xpu import rule
from spec_verify_xpu.fixed_point import fixed
from spec_verify_xpu.ops import Call
from test_parity import EDGE_CASES, edge_case_batch

numba = pytest.importorskip("numba")

from spec_verify_xpu import compiled_cpu  # noqa: E402

PACKAGE = Path(compiled_cpu.__file__).parent
PROBABILITY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNIFORM_DTYPES = (torch.float32, torch.float64, torch.int64)
TOKEN_DTYPES = (torch.int64, torch.int32)


@pytest.fixture
def threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def split(monkeypatch):
    """Every batch of several sequences is worth as many threads as torch has."""
    monkeypatch.setattr(compiled_cpu, "GRAIN", 1)
    monkeypatch.setattr(sv.repeats, "known", {})  # as worth one


def verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths=None, bonus_tokens=None):
    """Without the public function's checks, which want uniforms of one dtype."""
    B, K = draft_tokens.shape
    result = torch.empty(B, dtype=torch.int64), torch.empty(B, dtype=torch.int64)
    uniforms = uniform_accept, uniform_sample
    rest = None, None, rule.SAMPLE, lengths, None, K, None, bonus_tokens, False, None, 1.0, None, None
    compiled_cpu.verify(Call(draft_tokens, draft_probs, target_probs, *uniforms, *rest, None, None, *result))
    return result


def as_lists(result):
    return [x.tolist() for x in result]


def assert_equals_rule(batch):
    assert as_lists(verify(*batch)) == as_lists(batch.by_rule())


def every_function(batch, impl, dtype=torch.int64):
    """All that the implementation computes, from one batch: tensors of `dtype`."""
    B, K = batch.draft_tokens.shape
    ragged = [x if x is None else x.flatten(0, 1) for x in batch[:3]]
    offsets = torch.randint(-2, B * K + 3, (B + 1,), generator=torch.Generator().manual_seed(B))  # some end before they start
    greedy, seed = torch.arange(B) % 3 == 0, torch.arange(B) - B // 2
    given = with_bonus(batch, dtype)
    emitted = [torch.full((B, K + 3), 9, dtype=dtype) for _ in range(9)]
    inner = [x[:, 1 : K + 2] for x in emitted]
    common = {"dtype": dtype, "impl": impl}
    has_draft = B > 0 and batch.draft_probs is not None
    own = {"draft_slots": seed.to(dtype), "draft_temperature": seed / 2} if has_draft else {}
    results = (
        sv.verify(*batch[:5], lengths=batch.lengths, greedy=greedy, emitted=inner[0], **common),
        sv.verify(*batch[:3], seed=seed, offset=2**40, emitted=inner[1], **common),
        sv.verify_varlen(*ragged, offsets.to(dtype), K, seed=7, offset=seed, greedy=greedy, emitted=inner[2], **common),
        sv.verify_greedy(batch.draft_tokens, batch.target_probs, lengths=batch.lengths, emitted=inner[3], **common),
        [sv.sample(batch.target_probs, seed=torch.arange(B * (K + 1)).view(B, K + 1), **common)],
        sv.verify_logits(*batch[:5], lengths=batch.lengths, greedy=greedy, emitted=inner[4], **common),
        sv.verify_logits_varlen(*ragged, offsets.to(dtype), K, seed=seed, temperature=seed / 2, emitted=inner[5], **common),
        [sv.sample_logits(batch.target_probs, temperature=0.7, seed=3, offset=torch.arange(K + 1).expand(B, -1), **common)],
        sv.verify(*given[:3], seed=seed, greedy=greedy, bonus_tokens=given[6], emitted=inner[6], **common),
        sv.verify_logits_varlen(
            ragged[0],
            ragged[1],
            given.target_probs.flatten(0, 1),
            offsets,
            K,
            seed=seed,
            temperature=seed / 2,
            bonus_tokens=given[6],
            emitted=inner[7],
            **common,
        ),
        sv.verify_logits(*batch[:3], seed=seed, offset=seed, emitted=inner[8], **own, **common),
        [sv.emit(batch.draft_tokens.clamp(-1, 2**31 - 1), seed, seed.to(dtype), pad=-7, impl=impl)],
    )
    return [*itertools.chain(*results), *emitted]


def assert_all_equal(found, expected):
    assert len(found) == len(expected)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, expected))


def run(code, environment=None):
    """A fresh Python process with the package on its path."""
    environment = environment or {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case["name"])
def test_edge_case(case):
    assert as_lists(verify(*edge_case_batch(case))) == [case["accepted"], case["next_token"]], case["why"]


@pytest.mark.parametrize("V, B", [(3, 4000), (100, 4000), (600, 2000)], ids=["few", "one_block", "two_blocks"])
def test_ten_thousand_sequences(V, B):
    """4,000 of three tokens (ties everywhere), 4,000 inside one block, 2,000 whose draw crosses from one block to the next."""
    assert_equals_rule(random_batch(B, 4, V, uniform=torch.float32, seed=V))


@pytest.mark.parametrize("kind", ["probs", "one_hot", "bonus"])
@pytest.mark.parametrize("V", [1, 7, 511, 512, 513, 1100], ids=lambda V: f"V{V}")
def test_hostile_content(V, kind):
    """One token, an unfinished vector, a block less one, whole, and more one, and three blocks."""
    batch = hostile_batch(100, 4, V, seed=V, one_hot=kind == "one_hot")
    assert_equals_rule(with_bonus(batch) if kind == "bonus" else batch)


def test_every_mix_of_dtypes():
    batch = hostile_batch(12, 3, 21, seed=0)
    one_hot = batch._replace(draft_probs=None)
    ints = [x.nan_to_num(0.3, 1, 0).clamp(0, 1).double().mul(2**62).long() for x in batch[3:5]]

    def uniform(i, dtype):
        return ints[i] if dtype == torch.int64 else batch[3 + i].to(dtype)

    for tokens, lengths, draft, target, accept, sample in itertools.product(
        TOKEN_DTYPES, TOKEN_DTYPES, (None, *PROBABILITY_DTYPES), PROBABILITY_DTYPES, UNIFORM_DTYPES, UNIFORM_DTYPES
    ):
        base = one_hot if draft is None else batch._replace(draft_probs=batch.draft_probs.to(draft))
        ids = base.draft_tokens if tokens == torch.int64 else base.draft_tokens.clamp(-(2**31), 2**31 - 1).int()
        uniforms = uniform(0, accept), uniform(1, sample)
        assert_equals_rule(Batch(ids, base.draft_probs, base.target_probs.to(target), *uniforms, base.lengths.to(lengths)))


@pytest.mark.parametrize("dtype", PROBABILITY_DTYPES[1:])
def test_every_half(dtype):
    """All 2**16 values: certain drafts are accepted up to the last uniform below the target's probability, and no further."""
    target_probs = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(-1, 1, 1).expand(-1, 2, 1)
    p = fixed(target_probs[:, :1, 0])
    drafts = torch.zeros_like(p)
    uniform_sample = torch.zeros(len(p), 2, dtype=torch.int64)

    def accepted(steps):  # a step is the smallest difference of uniforms that a certain draft can see
        return verify(drafts, None, target_probs, steps * 2**19, uniform_sample, None)[0].bool()[:, None]

    assert torch.equal(accepted((p - 1).clamp(min=0)), p > 0)
    assert torch.equal(accepted(p.clamp(max=rule.ONE - 1)), p == rule.ONE)


def test_threshold_at_the_edge_of_a_block():
    """Eighths of a flat row of two blocks, each the first token past them, and no token of a block without mass."""
    flat = torch.full((1, 1, 1024), 2.0**-10).repeat(8, 1, 1)
    none = torch.zeros(8, 0)
    eighths = torch.arange(8)[:, None] * 2**60
    assert verify(none.long(), None, flat, none, eighths, None)[1].tolist() == list(range(0, 1024, 128))
    flat[..., :600] = 0
    assert verify(none.long(), None, flat, none, eighths, None)[1].tolist() == list(range(600, 1024, 53))


@pytest.mark.parametrize(
    "dtype, mass, token", [(torch.float32, 2.0**-25, 0), (torch.float32, 2.0**-23, 1), (torch.float64, 2.0**-44, 1)]
)
def test_largest_uniform(dtype, mass, token):
    """1 and more count as the largest below 1. It reaches a last token of this mass, or in float32 misses it by its step."""
    step = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    u = torch.tensor([[1 - step], [1], [2], [torch.inf]], dtype=dtype)
    none = torch.zeros(4, 0, dtype=torch.int64)
    batch = Batch(none, None, torch.tensor([1, mass]).expand(4, 1, 2), none, u)
    assert verify(*batch)[1].tolist() == [token] * 4
    assert_equals_rule(batch)


def test_longest_rows_of_ones():
    """The largest sum of a row, just below 2**63, where the largest threshold takes the last token."""
    V = 2**19 - 1
    target_probs = torch.ones(1, 1, V).expand(2, 2, V)
    draft_probs = torch.zeros(1, 1, V, dtype=torch.float16).expand(2, 1, V)
    uniforms = torch.tensor([[2**63 - 1] * 2, [2**62] * 2])
    assert_equals_rule(Batch(torch.tensor([[-1], [0]]), draft_probs, target_probs, uniforms[:, :1], uniforms))


def test_residual_of_ones():
    """The largest sum of a block, 2**31 in the high limb: two whole blocks and a part of ones, of which none is drafted."""
    draft_probs, target_probs = torch.zeros(2, 1, 1500), torch.ones(2, 2, 1500)
    draft_probs[..., 1400], target_probs[..., 1400] = 1, 0
    uniforms = torch.tensor([[2**63 - 1] * 2, [2**62] * 2])
    assert_equals_rule(Batch(torch.full((2, 1), 1400), draft_probs, target_probs, uniforms[:, :1], uniforms))


def test_flushed_denormals_change_nothing():
    batch = hostile_batch(50, 3, 100, seed=1)
    halves = batch._replace(draft_probs=batch.draft_probs.half() / 512, target_probs=batch.target_probs.half() / 512)
    expected = [as_lists(x.by_rule()) for x in (batch, halves)]
    assert torch.set_flush_denormal(True)
    try:
        assert [as_lists(verify(*x)) for x in (batch, halves)] == expected
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [*PROBABILITY_DTYPES, torch.float64])
def test_greedy_tells_flushed_denormals_apart(dtype):
    """Two blocks of nothing but subnormals and zeros. The second has the larger entry, at its third place and again later."""
    step = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    fields = torch.zeros(4, 1, 600, dtype=step)
    fields[:, 0, 10], fields[:, 0, 515], fields[:, 0, 520] = 1, 2, 2
    fields[1] += torch.iinfo(step).min  # the same of negatives: 0 is the largest, and the first of many
    fields[2, 0, 515:] = 0
    fields[3, 0, 10:] = 0
    none = torch.zeros(4, 0, dtype=torch.int64)
    assert torch.set_flush_denormal(True)
    try:
        assert sv.verify_greedy(none, fields.view(dtype), impl="numba").next_token.tolist() == [515, 0, 10, 0]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [*PROBABILITY_DTYPES, torch.float64])
@pytest.mark.parametrize("V", [1, 511, 512, 513, 1100])
def test_greedy_equals_rule(V, dtype):
    """Rows of few values, so that ties cross from one block to the next; hostile ones; all NaN; zeros of both signs."""
    g = torch.Generator().manual_seed(V)
    target = torch.randint(-9, 2, (40, 4, V), generator=g).to(dtype)
    hostile = torch.tensor(HOSTILE, dtype=torch.float64).to(dtype)
    target[1::2] = hostile[torch.randint(len(hostile), (20, 4, V), generator=g)]
    target[0], target[2] = torch.nan, -torch.inf
    target[4] = torch.tensor([0.0, -0.0])[torch.randint(2, (4, V), generator=g)]
    drafts = torch.tensor([[rule.argmax(row) for row in rows[:3]] for rows in target])
    drafts[torch.rand(40, 3, generator=g) < 0.1] = -1
    assert as_lists(sv.verify_greedy(drafts, target, impl="numba")) == list(rule.verify_greedy(drafts, target))


@pytest.mark.parametrize(
    "counter, key, output",  # of Random123, its kat_vectors
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, output):
    """In machine integers that wrap, where Python's do not."""
    assert list(numba.njit(rule.philox)(tuple(counter), tuple(key))) == output


def test_random_bits_of_machine_integers():
    """Any seed and offset, and the ends of their range: they stay integers of 64 bits throughout."""
    compiled = numba.njit(rule.random_bits)
    draw = random.Random(0)
    ends = [-(2**63), 2**63 - 1, -1, 0, 2**32 - 1, 2**32]
    pairs = [*itertools.product(ends, ends), *([draw.getrandbits(64) - 2**63 for _ in "so"] for _ in range(1000))]
    for i, (seed, offset) in enumerate(pairs):
        assert compiled(seed, offset, i, i % 3) == rule.random_bits(seed, offset, i, i % 3)
    assert [x.return_type for x in compiled.nopython_signatures] == [numba.int64]


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_every_function_of_hostile_content(dtype):
    """Two blocks. Outputs of either dtype, and rows of emitted apart, with what stands between them left alone."""
    batch = hostile_batch(60, 4, 600, seed=2)
    assert_all_equal(every_function(batch, "numba", dtype), every_function(batch, "reference", dtype))


def test_one_signature_serves_all():
    """A hundred shapes, strides, dtypes and absent arguments of every function after the warm-up: nothing compiles."""
    assert sv.warmup("cpu", impl="numba") > 0
    for i in range(100):
        B, K, V = i % 11, i % 7, 1 + 13 * i
        dtype, uniform, tokens = PROBABILITY_DTYPES[i % 3], UNIFORM_DTYPES[i // 3 % 3], TOKEN_DTYPES[i % 2]
        batch = random_batch(B, K, V, dtype=dtype, uniform=uniform, tokens=tokens, one_hot=i % 5 == 0)
        wide = torch.cat([batch.target_probs] * 2, -1)[..., :V]
        batch = batch._replace(target_probs=wide, lengths=torch.zeros(B, dtype=tokens) if i % 4 else None)
        verify(*batch)
        every_function(batch, "numba", TOKEN_DTYPES[i // 2 % 2])
        sv.verify_greedy(batch.draft_tokens, wide.double(), impl="numba")
    for function in (compiled_cpu.verify_sequences, compiled_cpu.emit_sequences):
        assert sum(function.stats.cache_hits.values()) + sum(function.stats.cache_misses.values()) == 1
        assert len(function.signatures) == 1


def test_repeated_calls(monkeypatch):
    """Batches of every option, again with other contents, go past the operator unless numbers are made tensors in the call.

    Those of which helpers do a share are not repeated.
    """
    monkeypatch.setattr(sv.repeats, "known", {})
    called = []
    monkeypatch.setattr(compiled_cpu, "verify", lambda call, run=compiled_cpu.verify: called.append(call) or run(call))
    for seed in range(100):
        batch, called[:] = any_ragged(seed), []
        for _ in range(2):
            assert_all_equal(batch.verify("numba"), batch.by_rule())
            batch = batch._replace(target_probs=moved(batch.target_probs, "cpu"))
            batch.target_probs.copy_(batch.target_probs.flip(0))
        seeds = [batch.options[name] for name in ("seed", "offset") if name in batch.options]
        own = batch.options.get("draft_temperature")
        makes_tensors = len(seeds) == 1 or any(isinstance(x, (int, float)) for x in (*seeds, own))
        needs_none = "bonus_tokens" in batch.options and len(batch.draft_tokens) == 0  # see ops.write_bonus_tokens
        assert len(called) == (0 if needs_none else 1 + makes_tensors)
    batch = random_batch(2, 1, 10)
    for grain, count in ((1, 2), (2**17, 1)):
        monkeypatch.setattr(compiled_cpu, "GRAIN", grain)
        called.clear()
        for _ in range(2):
            sv.verify(*batch[:5], impl="numba")
        assert len(called) == count


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_thread_count_changes_nothing(count, threads, split):
    """Fewer, as many, and more threads than the 7 sequences."""
    threads(count)
    batch = hostile_batch(7, 3, 600, seed=count)
    assert_equals_rule(batch)
    assert_all_equal(every_function(batch, "numba"), every_function(batch, "reference"))
    assert_equals_rule(random_batch(0, 3, 600))


def test_at_most_torchs_threads():
    code = """
import threading, torch
import spec_verify_xpu as sv
def threads_after(count):
    torch.set_num_threads(count)
    target = torch.full((8, 1, 2**16), 2.0**-16)
    empty = torch.empty(8, 0, dtype=torch.int64)
    sv.verify(empty, None, target, impl="numba")
    return threading.active_count()
print([threads_after(count) for count in (1, 2, 3, 1)])
"""
    assert run(code) == "[1, 2, 3, 3]\n"


def test_concurrent_calls(threads, split):
    """Eight Python threads at once, each call split further: the same tokens as by the rule."""
    threads(3)
    batches = [random_batch(9, 3, 700, seed=seed) for seed in range(8)]
    expected = [every_function(batch, "reference") for batch in batches]
    results = [[] for _ in batches]
    together = threading.Barrier(len(batches))

    def call(batch, found):
        torch.set_num_threads(3)  # a thread's own setting
        together.wait()
        found.extend(every_function(batch, "numba") for _ in range(30))

    callers = [threading.Thread(target=call, args=pair) for pair in zip(batches, results)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for found, want in zip(results, expected):
        assert len(found) == 30
        for result in found:
            assert_all_equal(result, want)


def test_memory_is_held_while_it_is_used():
    """Threads that share one heap: a buffer that was freed too soon would be another's, or break what the heap keeps in it."""
    code = """
import threading, torch
import spec_verify_xpu as sv
torch.set_num_threads(1)
rows = torch.rand(4, 64, 3, 3000).half()
none, uniform = torch.zeros(64, 0, dtype=torch.int64), torch.randint(2**62, (64, 3))
drafts = torch.randint(3000, (64, 2))
def results(i):
    calls = (drafts, rows[i, :, :2], rows[i]), (drafts, None, rows[i])
    functions = sv.verify, sv.verify_logits
    return [x for call in calls for f in functions for x in f(*call, uniform[:, :2], uniform, impl="numba")]
expected = [results(i) for i in range(4)]
wrong = []
def work(i):
    wrong.extend(x for _ in range(100) for x in map(torch.equal, results(i), expected[i]) if not x)
callers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
assert not wrong
"""
    run(code, {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "MALLOC_ARENA_MAX": "1"})


def test_helpers_let_go_of_tensors(threads, split):
    threads(2)
    batch = random_batch(2, 1, 10)
    verify(*batch)
    tensors = [weakref.ref(x) for x in batch[:5]]
    del batch
    deadline = time.monotonic() + 10
    while any(x() is not None for x in tensors):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork():
    """The child has none of its parent's threads, and starts its own."""
    code = """
import os, signal, torch
import spec_verify_xpu as sv
from spec_verify_xpu import compiled_cpu
compiled_cpu.GRAIN = 1
torch.set_num_threads(2)
probs, uniform = torch.full((4, 8), 0.125), torch.rand(4)
expected = sv.sample(probs, uniform, impl="numba").tolist()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(sv.sample(probs, uniform, impl="numba").tolist() != expected)
assert os.waitpid(child, 0)[1] == 0
"""
    run(code)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect by Linux's numbers")
def test_nothing_out_of_bounds_is_read():
    """Each tensor ends where a page begins that nobody may read, and begins where another ends, as far as its size allows."""
    code = """
import ctypes, mmap, torch
import spec_verify_xpu as sv
PAGE, held = mmap.PAGESIZE, []
def fenced(x, at_start):
    size = x.numel() * x.itemsize
    pages = -(-max(size, 1) // PAGE)
    held.append(mmap.mmap(-1, (pages + 2) * PAGE))
    address = ctypes.addressof(ctypes.c_char.from_buffer(held[-1]))
    for page in (0, pages + 1):
        assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + page * PAGE), PAGE, 0) == 0
    if size == 0:
        return x
    offset = PAGE if at_start else (pages + 1) * PAGE - size
    return torch.frombuffer(held[-1], dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).copy_(x)
B, K, V = 5, 3, 1100
for T, ends in ((9, [0, 2, 2, 5, 8, 9]), (9, [9] * 6), (9, [-5, 99, -(2**63), 2**63 - 1, 4, 0]), (0, [0, 1, 5, -1, 0, 2])):
    for dtype in (torch.float32, torch.float16):
        for at_start in (False, True):
            ids, rows = torch.randint(V, (T,)), torch.rand(T + B, V).to(dtype)
            ids[::3] = torch.tensor([V, -1, 2**40])[: len(ids[::3])]
            tensors = ids, rows[:T], rows, torch.tensor(ends)
            ids, draft, target, cu = (fenced(x, at_start) for x in tensors)
            uniforms = (fenced(torch.randint(2**62, (n,)), at_start) for n in (T, T + B))
            greedy, seed, *out = (fenced(torch.arange(B), at_start) for _ in range(4))
            emitted = fenced(torch.zeros(B, K + 1, dtype=torch.int32), at_start)
            common = dict(greedy=greedy > 2, out=out, emitted=emitted, impl="numba")
            sv.verify_varlen(ids, draft, target, cu, K, *uniforms, **common)
            sv.verify_varlen(ids, draft, target, cu, K, seed=seed, **common)
            temperature = fenced(torch.linspace(0, 2, B), at_start)
            sv.verify_logits_varlen(ids, draft, target, cu, K, seed=seed, temperature=temperature, **common)
            sv.verify_logits_varlen(ids, None, target, cu, K, seed=seed, **common)
            sv.verify_greedy(ids[:0].view(0, 0), target[:0, None], impl="numba")
            dense = target[:B, None].expand(B, K + 1, V)
            sv.verify_greedy(torch.full((B, K), -1), dense, lengths=seed + 2**62, out=out, emitted=emitted, impl="numba")
"""
    run(code)


@pytest.fixture
def no_folder_for_a_cache(tmp_path):
    """The environment of a copy of the package next to which nothing can be cached, nor at home."""
    package = tmp_path / PACKAGE.name
    package.mkdir()
    for source in PACKAGE.glob("*.py"):
        (package / source.name).write_bytes(source.read_bytes())
    (package / "__pycache__").touch()  # not a folder, which stops even root from writing there
    clean = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    return {**clean, "PYTHONPATH": str(tmp_path), "HOME": os.devnull}


def test_import_is_lazy_and_needs_no_cache(no_folder_for_a_cache):
    code = """
import sys, spec_verify_xpu
assert "numba" not in sys.modules
from spec_verify_xpu import compiled_cpu
"""
    run(code, no_folder_for_a_cache)


def test_cache_of_a_package_that_cannot_be_written(no_folder_for_a_cache, tmp_path):
    """The first process compiles into the user's cache, and the next loads from there."""
    code = """
from spec_verify_xpu import compiled_cpu
compiled_cpu.warmup()
for function in (compiled_cpu.verify_sequences, compiled_cpu.emit_sequences):
    print(function.stats.cache_path, len(function.stats.cache_hits), len(function.stats.cache_misses))
"""
    home = tmp_path / "home"
    for counts in ("0 1", "1 0"):  # hits, misses
        lines = run(code, {**no_folder_for_a_cache, "HOME": str(home)}).splitlines()
        found = [line.split(maxsplit=1) for line in lines]
        assert len(found) == 2 and all(Path(path).is_relative_to(home) and x == counts for path, x in found)
    assert {x.name for x in (tmp_path / PACKAGE.name).iterdir()} == {"__pycache__", *(x.name for x in PACKAGE.glob("*.py"))}


def test_cache_follows_the_sources_of_the_rule(tmp_path):
    """What one process keeps is not taken by another in which a function that is compiled into it has changed."""
    package = tmp_path / PACKAGE.name
    package.mkdir()
    for source in PACKAGE.glob("*.py"):
        (package / source.name).write_bytes(source.read_bytes())
    code = """
import torch, spec_verify_xpu as sv
probs = torch.full((50, 100), 0.01)
tokens = [sv.sample(probs, seed=torch.arange(50), impl=impl) for impl in ("numba", "reference")]
assert torch.equal(*tokens)
print(tokens[0].tolist())
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    before = run(code, environment)
    rule = package / "rule.py"
    changed = rule.read_text().replace("0x9E3779B9", "0x9E3779BB")
    rule.write_text(changed)
    assert run(code, environment) != before
