"""Every implementation equals the rule, bit for bit."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import spec_verify_xpu as sv
from batches import HOSTILE, Batch, assert_equals_rule, hostile_batch, random_batch, with_bonus

EDGE_CASES = json.loads((Path(__file__).parent / "edge_cases.json").read_text())
HALVES = (torch.float16, torch.bfloat16)

# Each shape is (B, K, V, why).
SHAPES = [
    (5, 3, 1, "a vocabulary of one token"),
    (40, 3, 2, "the smallest choice"),
    (40, 5, 100, "inside one chunk"),
    (6, 4, 511, "one under a chunk"),
    (6, 4, 512, "one chunk"),
    (6, 4, 513, "one over a chunk"),
    (8, 5, 4095, "one under a power of two: the last chunk ends in a masked lane"),
    (8, 5, 4096, "whole chunks, wide loads"),
    (3, 5, 8193, "a last chunk of one entry"),
    (2, 5, 32000, "Llama 2"),
    (1, 2, 151936, "Qwen: more sums than one tile of 128 holds"),
    (7, 0, 100, "no drafts"),
    (0, 4, 100, "no sequences"),
    (3, 16, 100, "as many drafts as one tile tests"),
    (3, 17, 100, "one draft more than the smallest tile"),
    (3, 40, 33, "a long draft"),
]


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case["name"])
def test_edge_case(case, impl, device):
    result = edge_case_batch(case).to(device).verify(impl)
    assert [x.tolist() for x in result] == [case["accepted"], case["next_token"]], case["why"]


def edge_case_batch(case):
    target_probs = torch.tensor(case["target_probs"])
    B, rows, V = target_probs.shape
    drafts = (B, rows - 1)
    draft_probs = case["draft_probs"]
    return Batch(
        torch.tensor(case["draft_tokens"], dtype=torch.int64).view(drafts),
        None if draft_probs is None else torch.tensor(draft_probs).view(*drafts, V),
        target_probs,
        torch.tensor(case["uniform_accept"]).view(drafts),
        torch.tensor(case["uniform_sample"]),
        None if case["lengths"] is None else torch.tensor(case["lengths"]),
    )


@pytest.mark.parametrize("B, K, V, why", SHAPES, ids=lambda x: str(x) if isinstance(x, int) else "")
@pytest.mark.parametrize("kind", ["probs", "one_hot", "bonus"])
def test_shape(B, K, V, why, kind, impl, device):
    batch = random_batch(B, K, V, one_hot=kind == "one_hot", seed=V)
    assert_equals_rule(with_bonus(batch) if kind == "bonus" else batch, impl, device)


@pytest.mark.parametrize("V, B", [(3, 4000), (100, 4000), (600, 2000)], ids=["few", "one_chunk", "two_chunks"])
def test_ten_thousand_sequences(V, B, impl, device, sequences):
    """4,000 of three tokens (ties everywhere), 4,000 inside one chunk, 2,000 whose draw crosses from one chunk to the next."""
    assert_equals_rule(random_batch(sequences(B), 4, V, uniform=torch.float32, seed=V), impl, device)


@pytest.mark.parametrize("V_draft, V", [(100, 130), (130, 100), (512, 600), (1, 700), (700, 1)])
def test_vocabularies_differ(V_draft, V, impl, device):
    """Narrower and wider drafts, across a chunk's edge, and down to one token."""
    assert_equals_rule(random_batch(30, 4, V, V_draft=V_draft), impl, device)


@pytest.mark.parametrize("tokens", [torch.int32, torch.int64])
@pytest.mark.parametrize("uniform", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, uniform, tokens, impl, device):
    """48 entries keep wide loads of half-precision rows aligned; 47 do not."""
    for V in (48, 47):
        assert_equals_rule(random_batch(12, 3, V, dtype=dtype, uniform=uniform, tokens=tokens, seed=V), impl, device)


@pytest.mark.parametrize("dtype", HALVES)
def test_dtypes_of_draft_and_target_differ(dtype, impl, device):
    batch = random_batch(12, 3, 48)
    assert_equals_rule(batch._replace(draft_probs=batch.draft_probs.to(dtype)), impl, device)
    assert_equals_rule(batch._replace(target_probs=batch.target_probs.to(dtype)), impl, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_floats_at_the_ends(dtype, impl, device):
    """Zero, the smallest numbers, the largest below 1, 1 and beyond: each alone decides one sequence's draw and acceptance."""
    values = torch.tensor([*HOSTILE, 2.0**-63, 2.0**-64, 2.0**-11, 5e-324], dtype=torch.float64).to(dtype)
    batch = random_batch(len(values), 1, 40)
    ends = values[:, None]
    assert_equals_rule(batch._replace(uniform_accept=ends, uniform_sample=ends.repeat(1, 2)), impl, device)


def test_uniforms_of_two_dtypes_when_one_is_drawn(impl, device):
    """The caller's float32 beside our int64: the caller's half still decides acceptance."""
    batch = random_batch(50, 3, 64, uniform=torch.float32).to(device)
    accepted, next_token = sv.verify(*batch[:4], None, impl=impl)
    assert accepted.tolist() == batch.verify(impl).accepted.tolist()
    assert ((next_token >= 0) & (next_token < 64)).all()


def test_lengths_are_clamped(impl, device):
    batch = random_batch(7, 4, 64)
    for dtype in (torch.int32, torch.int64):
        lengths = torch.tensor([-5, 0, 1, 3, 4, 5, 2**31 - 1], dtype=dtype)
        assert_equals_rule(batch._replace(lengths=lengths), impl, device)
        assert_equals_rule(with_bonus(batch._replace(lengths=lengths), dtype), impl, device)
    assert_equals_rule(batch._replace(lengths=torch.tensor([2**62, -(2**62), 2**32, 1, 2, 3, 4])), impl, device)


@pytest.mark.parametrize("kind", ["probs", "one_hot", "bonus"])
@pytest.mark.parametrize("V", [7, 600], ids=["one_chunk", "two_chunks"])
def test_hostile_content(V, kind, impl, device, sequences):
    batch = hostile_batch(sequences(200), 4, V, seed=V, one_hot=kind == "one_hot")
    assert_equals_rule(with_bonus(batch, torch.int32) if kind == "bonus" else batch, impl, device)


@pytest.mark.parametrize("V", [512, 1024, 2049], ids=["full_chunk", "full_tile", "past_the_tile"])
def test_sums_of_ones(V, impl, device):
    """Rows of ones are the largest sums that any input can make: 512 of them are 2**31 in the high limb."""
    batch = random_batch(4, 1, V)
    ones = torch.ones_like(batch.target_probs)
    assert_equals_rule(batch._replace(target_probs=ones, draft_probs=batch.draft_probs * 0), impl, device)
    assert_equals_rule(batch._replace(target_probs=ones, draft_probs=batch.draft_probs * 0 + 2.0**-44), impl, device)


@pytest.mark.parametrize("V", [5, 513, 1500], ids=["one_chunk", "two_chunks", "three_chunks"])
def test_residual_without_mass(V, impl, device):
    """The draft covers the target everywhere, and the target sums to less than 1, so a rejection finds no residual."""
    batch = random_batch(20, 2, V)
    batch = batch._replace(target_probs=batch.target_probs * 0 + 0.5 / V, draft_probs=batch.draft_probs * 0 + 1 / V)
    assert_equals_rule(batch._replace(uniform_accept=torch.full((20, 2), -1)), impl, device)


def test_rows_without_mass(impl, device):
    batch = random_batch(6, 2, 600)
    empty = batch.target_probs * 0
    assert_equals_rule(batch._replace(target_probs=empty), impl, device)
    assert_equals_rule(batch._replace(target_probs=empty, lengths=torch.tensor([0, 1, 2, 0, 1, 2])), impl, device)


def test_strided_inputs(impl, device):
    """Every tensor as a view: rows apart, axes exchanged, entries out of wider tensors, expanded rows."""
    batch = random_batch(6, 3, 64)
    wide = torch.zeros(6, 4, 100)
    wide[..., 5:69] = batch.target_probs
    apart = batch.draft_probs.transpose(0, 1).contiguous().transpose(0, 1)
    assert apart.stride(0) < apart.stride(1)
    every_third = torch.stack([batch.uniform_sample] * 3, -1).flatten(1)[:, ::3]
    views = Batch(batch.draft_tokens.t().contiguous().t(), apart, wide[..., 5:69], batch.uniform_accept.flip(1).flip(1),
                  every_third, torch.tensor([3, 0, 2, 0, 1, 0])[::2].repeat(2)[:6])  # fmt: skip
    for x in (views, batch._replace(target_probs=batch.target_probs[:1].expand(6, 4, 64))):
        assert_equals_rule(x, impl, device)
        assert_equals_rule(with_bonus(x)._replace(bonus_tokens=torch.arange(12)[::2]), impl, device)


@pytest.mark.parametrize("axis", ["batch", "position"])
def test_offsets_past_32_bits(axis, impl, device, monkeypatch):
    """Rows more than 2**31 entries apart. The memory between them is asked for and never touched, so not poisoned either."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    B, K, V = 2, 2, 96
    far = 2**31 + 16
    strides = (far, 128, 1) if axis == "batch" else (128 * (K + 1), far, 1)
    batch = random_batch(B, K, V, dtype=torch.float16)
    views = []
    for x in (batch.draft_probs.to(device), batch.target_probs.to(device)):
        reach = sum((n - 1) * s for n, s in zip(x.shape, strides)) + 1
        memory = torch.empty(reach, dtype=torch.float16, device=device).as_strided(x.shape, strides)
        views.append(memory.copy_(x))
    result = batch.to(device)._replace(draft_probs=views[0], target_probs=views[1]).verify(impl)
    assert [x.tolist() for x in result] == [x.tolist() for x in batch.by_rule()]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_input(data, impl, device):
    """Shapes, vocabularies, dtypes and floats as Hypothesis finds them."""
    B, K = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 5))
    V, V_draft = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    dtype = data.draw(st.sampled_from([torch.float32, *HALVES]))
    entry = st.one_of(st.sampled_from(HOSTILE), st.floats(0, 1, width=32), st.floats(width=32))

    def tensor(shape, entry, dtype):
        n = torch.Size(shape).numel()
        return torch.tensor(data.draw(st.lists(entry, min_size=n, max_size=n)), dtype=dtype).view(shape)

    uniform, bits = data.draw(
        st.sampled_from([(torch.float32, entry), (torch.float64, entry), (torch.int64, st.integers(-(2**63), 2**63 - 1))])
    )
    batch = Batch(
        tensor((B, K), st.integers(-1, V_draft), torch.int64),
        tensor((B, K, V_draft), entry, dtype) if data.draw(st.booleans()) else None,
        tensor((B, K + 1, V), entry, dtype),
        tensor((B, K), bits, uniform),
        tensor((B, K + 1), bits, uniform),
        tensor((B,), st.integers(-1, K + 1), torch.int64) if data.draw(st.booleans()) else None,
    )
    assert_equals_rule(with_bonus(batch) if data.draw(st.booleans()) else batch, impl, device)
