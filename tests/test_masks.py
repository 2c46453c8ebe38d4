"""mask_logits: it cuts what the rule cuts, bit for bit, and what it leaves is verified like any other logits."""

import itertools
import math

import pytest
import torch

import spec_verify_xpu as sv
from batches import COLD, HOSTILE_LOGITS, WARM, logits_batch, spoil
from spec_verify_xpu import fixed_point, rule

INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Contents of tensors, beyond what a number may be.
COUNTS = [0, -3, 1, 2, 7, 39, 40, 41, 2**31 - 1, -(2**31)]
SHARES = [1.0, 0.95, 0.5, 0.1, 1e-6, 2.0**-44, 1e-20, 0.0, -1.0, 2.0, NAN]


def assert_equals_rule(logits, device, temperature=None, **cuts):
    """Numbers, or tensors with an entry for each row of logits [R, V]."""
    on_device = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in cuts.items()}
    T = temperature.to(device) if isinstance(temperature, torch.Tensor) else temperature
    got = sv.mask_logits(logits.to(device), temperature=T, **on_device)
    assert got.dtype == logits.dtype and got.device.type == device.type

    def of_row(x, r):
        return x[r].item() if isinstance(x, torch.Tensor) else x if x is None or isinstance(x, int) else rule.float32(x)

    expected = []
    for r, row in enumerate(logits.float().tolist()):
        T = rule.temperature_at(1.0 if temperature is None else temperature, r)
        expected.append(rule.mask(row, T, **{name: of_row(x, r) for name, x in cuts.items()}))
    expected = torch.tensor(expected).to(logits.dtype).view(logits.shape)
    assert torch.equal(got.cpu().nan_to_num(nan=0.125, neginf=-INF), expected.nan_to_num(nan=0.125, neginf=-INF))


def rows_with_ties(R, V, dtype=torch.float32, seed=0):
    """Half the rows of logits in quarters, of which many are equal, the other half of any."""
    rows = 2 * torch.randn(R, V, generator=torch.Generator().manual_seed(seed))
    rows[::2] = (4 * rows[::2]).round() / 4
    return rows.to(dtype)


CUTS = {"top_k": (5, COUNTS), "top_p": (0.8, SHARES), "min_p": (0.05, SHARES)}
COMBINATIONS = [names for n in range(4) for names in itertools.combinations(CUTS, n)]


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_rule(dtype, names, device):
    """Each cut alone and together, by a number and by tensors of any content, on rows with ties and on hostile ones."""
    g = torch.Generator().manual_seed(1)
    rows = rows_with_ties(60, 40, dtype)
    spoil(rows[::3], 0.2, g, HOSTILE_LOGITS)
    rows[3], rows[6], rows[9], rows[12, 1:], rows[15, :39] = -INF, NAN, 0, -INF, INF
    assert_equals_rule(rows, device, **{name: CUTS[name][0] for name in names})

    def choose(values, dtype=None):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (60,), generator=g)]

    for integer in (torch.int64, torch.int32):
        cuts = {name: choose(CUTS[name][1], integer if name == "top_k" else torch.float32) for name in names}
        assert_equals_rule(rows, device, choose(WARM + COLD), **cuts)
        assert_equals_rule(rows, device, 0.7, **cuts)


@pytest.mark.parametrize("V", [1, 2, 1023, 1024, 1025, 2100])
def test_vocabularies(V, device):
    """One token, two, around a block, and three blocks; more to keep than there is."""
    rows = rows_with_ties(3, V, seed=V)
    for top_k in (1, V - 1, V, V + 1, 100):
        assert_equals_rule(rows, device, 0.9, top_k=top_k, top_p=0.9, min_p=0.01)
    assert_equals_rule(rows, device, top_p=0.99)
    assert_equals_rule(rows, device, min_p=0.01)


@pytest.mark.parametrize(
    "cuts, kept",
    [
        ({}, "abcdef"), ({"top_k": 0}, "abcdef"), ({"top_k": -1}, "abcdef"), ({"top_k": 6}, "abcdef"), ({"top_k": 1}, "b"),
        ({"top_k": 2}, "bd"), ({"top_k": 3}, "bde"), ({"top_p": 0.3}, "b"), ({"top_p": 0.5}, "bd"), ({"top_p": 0.8}, "bde"),
        ({"top_p": 1}, "abcde"), ({"top_p": 1e-30}, "b"), ({"min_p": 0}, "abcdef"), ({"min_p": 1}, "b"),
        ({"min_p": 0.4}, "bde"), ({"min_p": 0.08}, "abcde"), ({"top_k": 3, "top_p": 0.5}, "bd"), 
        ({"top_k": 2, "top_p": 0.45}, "b"), ({"top_k": 3, "top_p": 0.9, "min_p": 0.9}, "bd"),
    ],
    ids=str,
)  # fmt: skip
def test_by_hand(cuts, kept, device):
    """Of 32 parts b and d have 12 each, e 6, a and c one each, f none: b one step more, since the first gets what is left."""
    logits = torch.tensor([1.0, 12.0, 1.0, 12.0, 6.0, 2.0**-100]).log2()  # of a temperature at which logits are powers of 2
    got = sv.mask_logits(logits.to(device), temperature=rule.LOG2E, **cuts).tolist()
    assert "".join(name for name, x in zip("abcdef", got) if x > -INF) == kept
    assert got == rule.mask(logits, rule.LOG2E, **cuts)


@pytest.mark.parametrize("leading", [(), (3,), (2, 4), (0,), (2, 0)], ids=str)
def test_any_leading_shape(leading, device):
    """Numbers of the same shape, rows that are apart, and no input written."""
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(*leading, 60, generator=g)
    logits, top_p = wide[..., 5:45], torch.rand(leading, generator=g).clamp(min=0.1)
    k, min_p, T = torch.randint(-2, 30, leading, generator=g), torch.rand(leading, generator=g) / 9, top_p + 0.5
    before = wide.clone()
    inputs = {"temperature": T, "top_k": k, "top_p": top_p, "min_p": min_p}
    got = sv.mask_logits(logits.to(device), **{n: x.to(device) for n, x in inputs.items()})
    rows = zip(logits.reshape(-1, 40).tolist(), *(x.flatten().tolist() for x in inputs.values()))
    assert got.shape == logits.shape and torch.equal(wide, before)
    assert got.flatten().tolist() == [x for row in rows for x in rule.mask(*row)]


def test_without_a_cut_it_is_a_copy(device):
    logits = torch.randn(3, 9, device=device)
    for cuts in ({}, {"top_k": 0}, {"top_k": 9}, {"min_p": 0}):
        got = sv.mask_logits(logits, **cuts)
        assert torch.equal(got, logits) and got.data_ptr() != logits.data_ptr()


def test_the_argmax_stays(device):
    """Whatever the cuts hold, so that sequences without chance lose nothing."""
    g = torch.Generator().manual_seed(0)
    logits = rows_with_ties(400, 40).to(device)
    k, T = (torch.tensor(x, device=device)[torch.randint(len(x), (400,), generator=g)] for x in (COUNTS, WARM + COLD))
    p, m = (torch.tensor(SHARES, device=device)[torch.randint(len(SHARES), (400,), generator=g)] for _ in range(2))
    got = sv.mask_logits(logits, temperature=T, top_k=k, top_p=p, min_p=m.clamp(max=1))
    assert torch.equal(fixed_point.order(got).argmax(-1), fixed_point.order(logits).argmax(-1))


def test_masked_rows_are_verified(impl, device):
    """Draft and target cut alike: what is cut never comes, and the tokens are the rule's, of the same cut rows."""
    batch = logits_batch(4, 2, 40)
    T = torch.tensor([0.7, 1.0, 0.0, 2.0])

    def masked(x):
        share = T[:, None].expand(x.shape[:-1])
        return sv.mask_logits(x.to(device), temperature=share.to(device), top_k=12, top_p=0.9, min_p=0.02)

    draft, target = masked(batch.draft_probs), masked(batch.target_probs)
    options = {"temperature": T.to(device), "seed": torch.arange(4, device=device)}
    emitted = torch.empty(4, 3, dtype=torch.int64, device=device)
    drafts = sv.sample_logits(draft.reshape(8, 40), temperature=T.repeat_interleave(2).to(device), seed=3, impl=impl).view(4, 2)
    result = sv.verify_logits(drafts, draft, target, **options, emitted=emitted, impl=impl)
    expected = rule.verify(drafts.cpu(), draft.cpu(), target.cpu(), seed=torch.arange(4), temperature=T)
    assert [x.tolist() for x in result] == list(expected)
    logits = target.gather(-1, emitted.clamp(min=0)[..., None])[..., 0]
    assert (logits[emitted >= 0] > -INF).all()


def test_large_rows_with_ties(device):
    """A vocabulary of 151,936 in bfloat16, where thousands of logits are equal: in exactly k ranks, and as the rule cuts."""
    logits = (3 * torch.randn(2, 151936, generator=torch.Generator().manual_seed(0))).bfloat16()
    got = sv.mask_logits(logits.to(device), top_k=5000)
    assert ((got > -INF).sum(-1) == 5000).all()
    assert_equals_rule(logits[:1], device, 0.8, top_k=50000, top_p=0.9, min_p=1e-4)


def test_traces_without_rounding_otherwise(device):
    """As an operator, which inductor calls where it would fuse float32 operations; with shapes that change."""
    from spec_verify_xpu._ops import ops

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, T, k: sv.mask_logits(x + 1, temperature=T, top_k=k, top_p=0.9, min_p=0.01) - 1, fullgraph=True, dynamic=True
    )
    for R, V in ((3, 50), (5, 1100)):
        x, k = rows_with_ties(R, V).to(device), torch.arange(R, device=device) * 9
        T = torch.full((R,), 0.7, device=device)
        assert torch.equal(compiled(x, T, k), sv.mask_logits(x + 1, temperature=T, top_k=k, top_p=0.9, min_p=0.01) - 1)
    torch.library.opcheck(ops.mask.default, (x, T, k, T, T))
    torch.library.opcheck(ops.mask.default, (x, T, None, None, None))


def test_inputs_that_require_grad_are_data(device):
    logits = torch.randn(3, 9, device=device, requires_grad=True)
    assert not sv.mask_logits(logits, top_p=0.5, min_p=0.1).requires_grad


GOOD = {"logits": torch.zeros(2, 3, 9)}
BAD_CALLS = [
    ("logits", [[0.5]], TypeError), ("logits", torch.zeros(9, dtype=torch.float64), TypeError),
    ("logits", torch.zeros(9).long(), TypeError), ("logits", torch.zeros(()), ValueError),
    ("logits", torch.zeros(2, 0), ValueError), ("logits", torch.zeros(9, 2).t(), ValueError),
    *(("temperature", x, TypeError) for x in ("1", True, torch.ones(2, 3).double())),
    *(("temperature", x, ValueError) for x in (-1.0, NAN, torch.ones(2), torch.ones(2, 3, device="meta"))),
    *(("top_k", x, TypeError) for x in (2.0, True, "2", torch.ones(2, 3), torch.ones(2, 3).to(torch.int16))),
    *(("top_k", x, ValueError) for x in (2**63, torch.ones(3).long(), torch.ones(2, 3, device="meta").long())),
    *((name, x, TypeError) for name in ("top_p", "min_p") for x in ("1", True, [0.5], torch.ones(2, 3).half())),
    *((name, x, ValueError) for name in ("top_p", "min_p") for x in (-0.1, 1.1, NAN, INF, torch.ones(3), torch.ones(()))),
    ("top_p", 0, ValueError),
]  # fmt: skip


@pytest.mark.parametrize("name, given, error", BAD_CALLS, ids=[f"{x[0]}-{i}" for i, x in enumerate(BAD_CALLS)])
def test_bad_call(name, given, error):
    sv.mask_logits(**GOOD)
    with pytest.raises(error, match=rf"^{name}: expected .* got "):
        sv.mask_logits(**{**GOOD, name: given})
