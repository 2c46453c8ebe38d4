"""Statistics and log-probabilities against plain Python."""

import math

import pytest
import torch

import spec_verify_xpu as sv
from batches import as_ragged, random_batch


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("B, K", [(50, 4), (1, 1), (0, 4), (3, 0)], ids=["some", "one", "no_sequences", "no_drafts"])
def test_statistics(B, K, ids, device):
    """Of sequences with 0 to K drafts, and two whose numbers are out of range."""
    g = torch.Generator().manual_seed(0)
    drafted = torch.randint(0, K + 1, (B,), generator=g)
    accepted = (torch.rand(B, generator=g) * (drafted + 1)).long()
    if B == 50:
        drafted[0], drafted[1], accepted[1] = K + 7, -3, 0
    result = sv.statistics(accepted.to(device, ids), drafted.to(device, ids), max_drafts=K)
    counted = [min(max(n, 0), K) for n in drafted.tolist()]
    expected = sv.Statistics(
        sum(counted),
        sum(accepted.tolist()),
        sum(accepted.tolist()) + B,
        [sum(n > i for n in counted) for i in range(K)],
        [sum(n > i for n in accepted.tolist()) for i in range(K)],
    )
    assert [x.tolist() for x in result] == list(expected)
    assert all(x.dtype == torch.int64 and x.device.type == device.type for x in result)


def test_statistics_add_up(device):
    """By + and by sum, to those of all sequences at once."""
    steps = [torch.tensor([[2, 0], [3, 3]], device=device), torch.tensor([[1], [2]], device=device)]
    parts = [sv.statistics(*step, max_drafts=3) for step in steps]
    for total in (parts[0] + parts[1], sum(parts)):
        assert isinstance(total, sv.Statistics)
        assert all(map(torch.equal, total, sv.statistics(*torch.cat(steps, 1), max_drafts=3)))
    with pytest.raises(ValueError, match="expected Statistics of the same max_drafts, got 3 and 1"):
        parts[0] + sv.statistics(*steps[1], max_drafts=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logprobs(dtype, device):
    """Dense and ragged alike: the logarithm of the target's entry at each emitted token, 0 in the padding."""
    batch = random_batch(6, 4, 30, dtype=dtype)._replace(lengths=torch.tensor([4, 0, 2, 4, 1, 3])).to(device)
    emitted = torch.empty(6, 5, dtype=torch.int64, device=device)
    sv.verify(*batch[:5], lengths=batch.lengths, emitted=emitted)
    result = sv.logprobs(emitted, batch.target_probs)
    tokens, target = emitted.tolist(), batch.target_probs.tolist()
    expected = [[math.log(target[b][i][t]) if t >= 0 else 0.0 for i, t in enumerate(row)] for b, row in enumerate(tokens)]
    assert any(t < 0 for row in tokens for t in row)
    torch.testing.assert_close(result.cpu(), torch.tensor(expected))
    ragged = as_ragged(batch)
    assert torch.equal(sv.logprobs(emitted.int(), ragged.target_probs, ragged.cu_drafts.int()), result)


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_logprobs_without_mass_or_without_sequences(ragged, device):
    probs = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], device=device)
    cu_drafts = torch.tensor([0, 1], device=device)
    emitted = torch.tensor([[1, -1]], device=device)
    one, none = ((probs[0], cu_drafts), (probs[0, :0], cu_drafts[:1])) if ragged else ((probs,), (probs[:0],))
    assert sv.logprobs(emitted, *one).tolist() == [[-math.inf, 0]]
    assert sv.logprobs(emitted[:0], *none).shape == (0, 2)


def ones(*shape, dtype=torch.int64, **more):
    return torch.ones(shape, dtype=dtype, **more)


FLOAT = {"dtype": torch.float32}


@pytest.mark.parametrize(
    "name, function, arguments, error",
    [
        ("accepted", sv.statistics, ([1], ones(1), 2), TypeError),
        ("accepted", sv.statistics, (ones(1, 1), ones(1), 2), ValueError),
        ("drafted", sv.statistics, (ones(1), ones(2), 2), ValueError),
        ("drafted", sv.statistics, (ones(1), ones(1, **FLOAT), 2), TypeError),
        ("drafted", sv.statistics, (ones(1), ones(1, device="meta"), 2), ValueError),
        ("max_drafts", sv.statistics, (ones(1), ones(1), 2.0), TypeError),
        ("max_drafts", sv.statistics, (ones(1), ones(1), -1), ValueError),
        ("emitted", sv.logprobs, (ones(1, 2, **FLOAT), ones(1, 2, 5, **FLOAT)), TypeError),
        ("emitted", sv.logprobs, (ones(2), ones(1, 2, 5, **FLOAT)), ValueError),
        ("target_probs", sv.logprobs, (ones(1, 2), ones(1, 3, 5, **FLOAT)), ValueError),
        ("target_probs", sv.logprobs, (ones(1, 2), ones(1, 2, 5, dtype=torch.float64)), TypeError),
        ("target_probs", sv.logprobs, (ones(1, 2), ones(1, 2, 5, **FLOAT, device="meta")), ValueError),
        ("target_probs", sv.logprobs, (ones(1, 2), ones(1, 2, 5, **FLOAT), ones(2)), ValueError),
        ("cu_drafts", sv.logprobs, (ones(1, 2), ones(2, 5, **FLOAT), ones(3)), ValueError),
        ("cu_drafts", sv.logprobs, (ones(1, 2), ones(2, 5, **FLOAT), ones(2, **FLOAT)), TypeError),
    ],
)
def test_bad_call(name, function, arguments, error):
    with pytest.raises(error, match=rf"^{name}: expected .* got "):
        function(*arguments)
