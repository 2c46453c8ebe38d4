"""The CPU implementation that Numba compiles: equal to the rule, compiled once, safe from any thread."""

import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from batches import Batch, hostile_batch, random_batch
from spec_verify_xpu import rule
from spec_verify_xpu.fixed_point import fixed
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


def as_lists(result):
    return [x.tolist() for x in result]


def assert_equals_rule(batch):
    assert as_lists(compiled_cpu.verify(*batch)) == as_lists(batch.by_rule())


def run(code, environment=None):
    """A fresh Python process with the package on its path."""
    environment = environment or {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case["name"])
def test_edge_case(case):
    assert as_lists(compiled_cpu.verify(*edge_case_batch(case))) == [case["accepted"], case["next_token"]], case["why"]


@pytest.mark.parametrize("V, B", [(3, 4000), (100, 4000), (600, 2000)], ids=["few", "one_block", "two_blocks"])
def test_ten_thousand_sequences(V, B):
    """4,000 of three tokens (ties everywhere), 4,000 inside one block, 2,000 whose draw crosses from one block to the next."""
    assert_equals_rule(random_batch(B, 4, V, uniform=torch.float32, seed=V))


@pytest.mark.parametrize("one_hot", [False, True], ids=["probs", "one_hot"])
@pytest.mark.parametrize("V", [1, 7, 511, 512, 513, 1100], ids=lambda V: f"V{V}")
def test_hostile_content(V, one_hot):
    """One token, an unfinished vector, a block less one, whole, and more one, and three blocks."""
    assert_equals_rule(hostile_batch(100, 4, V, seed=V, one_hot=one_hot))


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
        return compiled_cpu.verify(drafts, None, target_probs, steps * 2**19, uniform_sample, None)[0].bool()[:, None]

    assert torch.equal(accepted((p - 1).clamp(min=0)), p > 0)
    assert torch.equal(accepted(p.clamp(max=rule.ONE - 1)), p == rule.ONE)


def test_threshold_at_the_edge_of_a_block():
    """Eighths of a flat row of two blocks, each the first token past them, and no token of a block without mass."""
    flat = torch.full((1, 1, 1024), 2.0**-10).repeat(8, 1, 1)
    none = torch.zeros(8, 0)
    eighths = torch.arange(8)[:, None] * 2**60
    assert compiled_cpu.verify(none.long(), None, flat, none, eighths, None)[1].tolist() == list(range(0, 1024, 128))
    flat[..., :600] = 0
    assert compiled_cpu.verify(none.long(), None, flat, none, eighths, None)[1].tolist() == list(range(600, 1024, 53))


@pytest.mark.parametrize(
    "dtype, mass, token", [(torch.float32, 2.0**-25, 0), (torch.float32, 2.0**-23, 1), (torch.float64, 2.0**-44, 1)]
)
def test_largest_uniform(dtype, mass, token):
    """1 and more count as the largest below 1. It reaches a last token of this mass, or in float32 misses it by its step."""
    step = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    u = torch.tensor([[1 - step], [1], [2], [torch.inf]], dtype=dtype)
    none = torch.zeros(4, 0, dtype=torch.int64)
    batch = Batch(none, None, torch.tensor([1, mass]).expand(4, 1, 2), none, u)
    assert compiled_cpu.verify(*batch)[1].tolist() == [token] * 4
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
        assert [as_lists(compiled_cpu.verify(*x)) for x in (batch, halves)] == expected
    finally:
        torch.set_flush_denormal(False)


def test_one_signature_serves_all():
    """A hundred shapes, strides, dtypes and absent arguments after the warm-up: nothing compiles."""
    assert compiled_cpu.warmup() > 0
    for i in range(100):
        dtype, uniform, tokens = PROBABILITY_DTYPES[i % 3], UNIFORM_DTYPES[i // 3 % 3], TOKEN_DTYPES[i % 2]
        batch = random_batch(i % 11, i % 7, 1 + 13 * i, dtype=dtype, uniform=uniform, tokens=tokens, one_hot=i % 5 == 0)
        wide = torch.cat([batch.target_probs] * 2, -1)[..., : 1 + 13 * i]
        compiled_cpu.verify(*batch._replace(target_probs=wide, lengths=torch.zeros(i % 11, dtype=tokens) if i % 4 else None))
    stats = compiled_cpu.verify_sequences.stats
    assert sum(stats.cache_hits.values()) + sum(stats.cache_misses.values()) == 1
    assert len(compiled_cpu.verify_sequences.signatures) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_thread_count_changes_nothing(count, threads, split):
    """Fewer, as many, and more threads than the 7 sequences."""
    threads(count)
    assert_equals_rule(hostile_batch(7, 3, 600, seed=count))
    assert_equals_rule(random_batch(0, 3, 600))


def test_at_most_torchs_threads():
    code = """
import threading, torch
from spec_verify_xpu import compiled_cpu
def threads_after(count):
    torch.set_num_threads(count)
    target = torch.full((8, 1, 2**16), 2.0**-16)
    empty = torch.empty(8, 0, dtype=torch.int64)
    compiled_cpu.verify(empty, None, target, empty, torch.zeros(8, 1, dtype=torch.int64), None)
    return threading.active_count()
print([threads_after(count) for count in (1, 2, 3, 1)])
"""
    assert run(code) == "[1, 2, 3, 3]\n"


def test_concurrent_calls(threads, split):
    """Eight Python threads at once, each call split further: the same tokens as one after the other."""
    threads(3)
    batches = [random_batch(9, 3, 700, seed=seed) for seed in range(8)]
    expected = [as_lists(compiled_cpu.verify(*batch)) for batch in batches]
    assert expected == [as_lists(batch.by_rule()) for batch in batches]
    results = [[] for _ in batches]
    together = threading.Barrier(len(batches))

    def call(batch, found):
        torch.set_num_threads(3)  # a thread's own setting
        together.wait()
        found.extend(as_lists(compiled_cpu.verify(*batch)) for _ in range(100))

    callers = [threading.Thread(target=call, args=pair) for pair in zip(batches, results)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [[x] * 100 for x in expected]


def test_helpers_let_go_of_tensors(threads, split):
    threads(2)
    batch = random_batch(2, 1, 10)
    compiled_cpu.verify(*batch)
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
from spec_verify_xpu import compiled_cpu
compiled_cpu.GRAIN = 1
torch.set_num_threads(2)
inputs = torch.empty(4, 0, dtype=torch.int64), None, torch.full((4, 1, 8), 0.125), torch.empty(4, 0), torch.rand(4, 1), None
expected = compiled_cpu.verify(*inputs)[1].tolist()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(compiled_cpu.verify(*inputs)[1].tolist() != expected)
assert os.waitpid(child, 0)[1] == 0
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
stats = compiled_cpu.verify_sequences.stats
print(stats.cache_path, len(stats.cache_hits), len(stats.cache_misses))
"""
    home = tmp_path / "home"
    for counts in ("0 1", "1 0"):  # hits, misses
        path, found = run(code, {**no_folder_for_a_cache, "HOME": str(home)}).split(maxsplit=1)
        assert Path(path).is_relative_to(home) and found.strip() == counts
    assert {x.name for x in (tmp_path / PACKAGE.name).iterdir()} == {"__pycache__", *(x.name for x in PACKAGE.glob("*.py"))}
