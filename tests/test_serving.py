"""Ragged batches, seeds, greedy sequences, sampling, and what a step emits: each equals the rule, and stays its own."""

import importlib.util
import itertools
import math
import os
import random

import pytest
import torch

import fuzz
import spec_verify_xpu as sv
from batches import Batch, any_ragged, as_ragged, placeholders, random_batch, spoil, uniforms, with_bonus
from spec_verify_xpu import eager, rule

if importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl

    from spec_verify_xpu.gpu import launch
    from spec_verify_xpu.gpu.kernels import random_bits

    @triton.jit
    def store_bits(numbers, words, out):
        tl.store(out, random_bits(tl.load(numbers), tl.load(numbers + 1), tl.load(words), tl.load(words + 1)))


SCORES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SEEDS = [0, 1, -1, 2**32, 2**32 - 1, -(2**63), 2**63 - 1, 1234567890123456789]  # both halves, alone and together


def equal(*results):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(*results))


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small, and torch's own threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Random batches


def test_random_ragged_batches(impl, device, sequences):
    """A share of `python tests/fuzz.py --batches 10000`."""
    found, wrong = fuzz.check(range(sequences(200)), impl, device)
    assert not wrong and found > sequences(500)


def test_reference_is_the_rule(device):
    found, wrong = fuzz.check(range(200), "reference", device)
    assert not wrong and found > 500


def test_random_batches_hold_what_they_are_for():
    batches = [any_ragged(seed) for seed in range(500)]
    accepted = set(itertools.chain.from_iterable(batch.by_rule()[0].tolist() for batch in batches))
    assert accepted >= set(range(17))
    for feature in (
        lambda x: x.size == 0,
        lambda x: len(x.draft_tokens) == 0,
        lambda x: len(x.draft_tokens) > 64,
        lambda x: x.draft_probs is None,
        lambda x: x.draft_probs is not None and x.draft_probs.shape[1] > x.target_probs.shape[1],
        lambda x: x.target_probs.isnan().any(),
        lambda x: x.target_probs.stride(0) > x.target_probs.shape[1],
        lambda x: (x.cu_drafts.diff() < 0).any(),
        lambda x: (x.cu_drafts.diff() > x.max_drafts).any(),
        lambda x: (x.cu_drafts < 0).any() and (x.cu_drafts > len(x.draft_tokens)).any(),
        lambda x: "seed" in x.options and "greedy" in x.options,
        lambda x: "bonus_tokens" in x.options and "greedy" in x.options,
        lambda x: "bonus_tokens" in x.options and x.size > 0 and len(x.draft_tokens) == 0,
        lambda x: x.emitted == torch.int32 and x.dtype == torch.int64,
        lambda x: x.logits and x.target_probs.shape[1] > 1024,
        lambda x: x.logits and isinstance(x.options.get("temperature"), torch.Tensor),
        lambda x: isinstance(x.options.get("draft_temperature"), torch.Tensor),
        lambda x: "draft_slots" in x.options and "draft_temperature" in x.options,
        lambda x: "draft_slots" in x.options and x.size > 0 and x.draft_probs.shape[1] < len(x.draft_tokens),
    ):
        assert sum(bool(feature(batch)) for batch in batches) >= 5


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("ACCEPT", rule.SAMPLE),
        ("random_bits", lambda seed, offset, position, purpose: rule.random_bits(seed, offset, 0, purpose)),
        ("order", lambda x: x),
        ("bits", lambda u: u.long() if u.is_floating_point() else u),
        ("within", lambda index, x: index.clamp(max=max(x.shape[1] - 2, 0))),
        ("emit", lambda *arguments: None),
    ],
)
def test_random_batches_catch_a_wrong_implementation(name, wrong, monkeypatch):
    monkeypatch.setattr(eager, name, wrong)
    try:
        assert fuzz.check(range(60), "eager", torch.device("cpu"))[1]
    except RuntimeError as error:
        assert str(error).startswith("the batch of seed ")


def test_many_threads_equal_the_rule(impl, device):
    """Eight at once, each on a stream of its own where there are streams."""
    if impl == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter is for one thread")
    batches, _, wrong, _ = fuzz.soak(range(40), impl, device, threads=8, seconds=2)
    assert not wrong and batches >= 40


# Ragged batches


@pytest.mark.parametrize("V", [33, 600, 8193], ids=["one_chunk", "two_chunks", "a_last_chunk_of_one"])
@pytest.mark.parametrize("kind", ["probs", "one_hot", "bonus"])
def test_varlen_equals_verify(V, kind, impl, device):
    batch = random_batch(8, 5, V, one_hot=kind == "one_hot", seed=V)._replace(lengths=torch.tensor([5, 0, 3, 1, 5, 2, 4, 5]))
    batch = (with_bonus(batch) if kind == "bonus" else batch).to(device)
    ragged = as_ragged(batch)
    assert equal(ragged.verify(impl), batch.verify(impl))
    seeds = {"seed": torch.arange(8, device=device) ** 20, "offset": torch.arange(8, device=device) - 4}
    ragged = ragged._replace(uniform_accept=None, uniform_sample=None, options={**ragged.options, **seeds})
    counts = {"lengths": batch.lengths, "bonus_tokens": batch.bonus_tokens}
    assert equal(ragged.verify(impl), sv.verify(*batch[:3], **counts, **seeds, impl=impl))


@pytest.mark.parametrize(
    "lengths, max_drafts",
    [([0] * 3, 4), ([0] * 3, 0), ([], 4), ([], 0), ([2, 3, 0], 0), ([2, 3, 0], 2), ([2, 3, 0], 100), ([16], 16), ([17], 17)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["probs", "one_hot", "bonus"])
def test_degenerate_sizes(lengths, max_drafts, kind, impl, device):
    """T = 0, B = 0, drafts cut or allowed for and not there, and as many as the smallest tile tests, or one more."""
    batch = random_batch(len(lengths), max([*lengths, 0]), 5, one_hot=kind == "one_hot")
    batch = batch._replace(lengths=torch.tensor(lengths, dtype=torch.int64))
    batch = with_bonus(batch) if kind == "bonus" else batch
    for options in ({}, {"seed": 3}, {"greedy": torch.ones(len(lengths), dtype=torch.bool)}):
        ragged = as_ragged(batch, options=options, emitted=torch.int64)._replace(max_drafts=max_drafts)
        if "seed" in options:
            ragged = ragged._replace(uniform_accept=None, uniform_sample=None)
        assert fuzz.is_right(ragged.to(device), [x.to(device) for x in ragged.by_rule()], impl)


def test_uniforms_drawn_inside(impl, device, sequences):
    """None without a seed: two calls differ, and a generator repeats them."""
    ragged = as_ragged(random_batch(sequences(40), 3, 64)).to(device)._replace(uniform_accept=None, uniform_sample=None)

    def run(seed):
        options = {} if seed is None else {"generator": torch.Generator(device).manual_seed(seed)}
        return ragged._replace(options=options).verify(impl)

    assert equal(run(1), run(1))
    assert not equal(run(1), run(2)) and not equal(run(None), run(None))


# Seeds

PHILOX = [  # Random123's known answers: counter, key, output
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
PHILOX = [tuple(tuple(int(word, 16) for word in words.split()) for words in vector) for vector in PHILOX]


def signed(x, width):
    """An unsigned integer as the signed one of the same bits."""
    return x - (1 << width) if x >> (width - 1) else x


@pytest.mark.parametrize("counter, key, expected", PHILOX)
def test_philox(counter, key, expected):
    assert rule.philox(counter, key) == expected
    on_tensors = rule.philox([torch.tensor([x]) for x in counter], [torch.tensor([x]) for x in key])
    assert [x.tolist() for x in on_tensors] == [[x] for x in expected]


@pytest.mark.parametrize("counter, key, expected", PHILOX)
def test_layout_of_the_random_bits(counter, key, expected, device):
    """The seed is the key, the rest the counter, and words 0 and 1 but for the top bit are the output."""
    seed, offset = (signed(high << 32 | low, 64) for low, high in (key, counter[:2]))
    bits = (expected[1] << 32 | expected[0]) % 2**63
    assert rule.random_bits(seed, offset, *counter[2:]) == bits
    numbers = torch.tensor([seed, offset])
    words = torch.tensor([signed(x, 32) for x in counter[2:]], dtype=torch.int32)
    assert rule.random_bits(*numbers[:, None], *(words.long() & rule.LOW_32)[:, None]).tolist() == [bits]
    if importlib.util.find_spec("triton") and launch.runs_on() == device.type:
        out = torch.empty(1, dtype=torch.int64, device=device)
        store_bits[(1,)](numbers.to(device), words.to(device), out)
        assert out.tolist() == [bits]


def by_hand(seeds, offsets, positions, purpose):
    """random_bits of each sequence at each position, [B, positions]."""
    return torch.tensor([[rule.random_bits(s, o, i, purpose) for i in range(positions)] for s, o in zip(seeds, offsets)])


def test_a_seed_stands_for_these_bits(impl, device):
    """Tests take purpose 0 and draws purpose 1, each at its own position; `sample` takes purpose 2 at position 0."""
    B = len(SEEDS)
    batch = random_batch(B, 4, 100).to(device)
    seed, offset = torch.tensor(SEEDS, device=device), torch.tensor(SEEDS[::-1], device=device)
    accept, draw = (by_hand(SEEDS, SEEDS[::-1], n, purpose).to(device) for n, purpose in ((4, 0), (5, 1)))
    by_seed = sv.verify(*batch[:3], seed=seed, offset=offset, impl=impl)
    assert equal(by_seed, sv.verify(*batch[:3], accept, draw, impl=impl))
    uniform = by_hand(SEEDS, SEEDS[::-1], 1, 2)[:, 0].to(device)
    probs = batch.target_probs[:, 0]
    assert torch.equal(sv.sample(probs, seed=seed, offset=offset, impl=impl), sv.sample(probs, uniform, impl=impl))


@pytest.mark.parametrize("seed, offset", [(5, None), (-1, 2**63 - 1), (2**40, -(2**40)), (-(2**63), 1)])
def test_an_int_seed_is_one_for_all(seed, offset, impl, device):
    batch = random_batch(6, 3, 100).to(device)
    ints = {"seed": seed} if offset is None else {"seed": seed, "offset": offset}
    tensors = {"seed": torch.full((6,), seed, device=device), "offset": torch.full((6,), offset or 0, device=device)}
    probs = batch.target_probs[:, 0]
    assert equal(sv.verify(*batch[:3], **ints, impl=impl), sv.verify(*batch[:3], **tensors, impl=impl))
    assert torch.equal(sv.sample(probs, **ints, impl=impl), sv.sample(probs, **tensors, impl=impl))
    mixed = {**tensors, "seed": seed}
    assert equal(sv.verify(*batch[:3], **mixed, impl=impl), sv.verify(*batch[:3], **tensors, impl=impl))


def test_a_request_gets_the_same_tokens_in_50_batches(impl, device):
    """Alone; and among one to four others of other lengths, seeds and offsets, at any place, dense and ragged by turns.

    600 entries are two chunks. Of the request's 3 drafts, in room for 5, some stand.
    """
    r, V, K, L, seed, offset = random.Random(0), 600, 5, 3, 2**40 + 7, -1
    request = random_batch(1, K, V, seed=4)
    alone = request.draft_tokens[:, :L], request.draft_probs[:, :L], request.target_probs[:, : L + 1]
    alone = [x.item() for x in sv.verify(*(x.to(device) for x in alone), seed=seed, offset=offset, impl=impl)]
    assert 0 < alone[0] < L
    places = set()
    for case in range(50):
        B = r.randint(2, 5)
        order = r.sample(range(B), B)
        others = random_batch(B - 1, K, V, seed=100 + case)
        batch = Batch(
            *(torch.cat(both)[order] for both in zip(request[:5], others[:5])),
            lengths=torch.tensor([L, *(r.randint(0, K) for _ in range(B - 1))])[order],
        )
        numbers = {"seed": [seed, *[case] * (B - 1)], "offset": [offset, *range(B - 1)]}
        chance = {name: torch.tensor(x)[order] for name, x in numbers.items()}
        if case % 2:
            ragged = as_ragged(batch, options=chance)._replace(uniform_accept=None, uniform_sample=None)
            result = ragged.to(device).verify(impl)
        else:
            chance = {name: x.to(device) for name, x in chance.items()}
            result = sv.verify(*batch.to(device)[:3], lengths=batch.lengths.to(device), **chance, impl=impl)
        place = order.index(0)
        assert [x[place].item() for x in result] == alone
        places.add((place, B))
    assert len(places) == 2 + 3 + 4 + 5  # every one


# Greedy sequences

NAN, INF = float("nan"), float("inf")
ROWS = [
    ([1, 3, 3, 2], 1, "the first of equals"),
    ([0, 0, 0, 0], 0, "all equal"),
    ([-0.0, 0.0, 0.0, -1], 0, "-0 is 0"),
    ([-1, 0.0, -0.0, -2], 1, "0 is -0"),
    ([0, 6e-8, 0, 0], 1, "subnormal in float16"),
    ([-6e-8, 0, 0, 0], 1, "negative and subnormal"),
    ([-3, -1, -2, -1], 1, "negative logits"),
    ([-INF, -5, -INF, -7], 1, "-inf is a number, the least"),
    ([NAN, -INF, -INF, NAN], 1, "NaN is less"),
    ([NAN, NAN, NAN, 2], 3, "the only number"),
    ([1, INF, NAN, INF], 1, "inf"),
    ([NAN] * 4, 0, "no number at all"),
    ([-NAN, NAN, -1, -NAN], 2, "NaN of either sign"),
]


@pytest.mark.parametrize("dtype", SCORES)
@pytest.mark.parametrize("ahead", [0, 509], ids=["one_chunk", "across_chunks"])
def test_argmax(dtype, ahead, impl, device):
    """Entries from 509 on lie on both sides of a chunk's edge; what stands ahead is NaN."""
    rows = torch.nn.functional.pad(torch.tensor([row for row, *_ in ROWS], dtype=dtype), (ahead, 0), value=NAN)
    expected = [best + ahead if any(x == x for x in row) else 0 for row, best, _ in ROWS]
    none = torch.empty(len(ROWS), 0, dtype=torch.int64, device=device)
    assert sv.verify_greedy(none, rows[:, None].to(device), impl=impl).next_token.tolist() == expected
    assert [rule.argmax(row) for row in rows] == expected


@pytest.mark.parametrize("dtype", SCORES)
def test_the_least_numbers_of_each_dtype(dtype, impl, device):
    """The smallest above zero beats zero, which no flush to zero may hide, and the least finite beats -inf."""
    info = torch.finfo(dtype)
    rows = torch.tensor([[0, 0, info.smallest_normal * info.eps], [-INF, info.min, NAN]], dtype=dtype, device=device)[:, None]
    assert rows[0, 0, 2] != 0
    none = torch.empty(2, 0, dtype=torch.int32, device=device)
    assert sv.verify_greedy(none, rows, impl=impl).next_token.tolist() == [2, 1]


@pytest.mark.parametrize("dtype", SCORES)
def test_greedy_equals_the_rule(dtype, impl, device, sequences):
    """Logits in steps of a half, so ties everywhere; most drafts the argmax, some placeholders; 70 entries of a chunk."""
    B, K, g = 60, 4, torch.Generator().manual_seed(1)
    target = ((3 * torch.randn(B, K + 1, 70, generator=g)).round() / 2).to(dtype)
    best = torch.tensor([[rule.argmax(row) for row in rows[:K]] for rows in target])
    drafts = torch.where(torch.rand(B, K, generator=g) < 0.8, best, torch.randint(70, (B, K), generator=g))
    spoil(drafts, 0.05, g, placeholders(70))
    lengths, few = torch.randint(-1, K + 2, (B,), generator=g), sequences(B)
    for given in (None, lengths):
        by_rule = rule.verify_greedy(drafts, target, given)
        assert set(by_rule[0]) == set(range(K + 1))
        given = given if given is None else given[:few].to(device)
        result = sv.verify_greedy(drafts[:few].to(device), target[:few].to(device), lengths=given, impl=impl)
        assert [x.tolist() for x in result] == [x[:few] for x in by_rule]


@pytest.mark.parametrize("seeds", [False, True], ids=["uniforms", "seeds"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["probs", "one_hot"])
def test_a_mask_changes_its_own_sequences_alone(seeds, one_hot, impl, device):
    """Where it is set the answer is verify_greedy's, whatever the draft's rows hold, and elsewhere that without a mask."""
    batch = random_batch(8, 4, 600, one_hot=one_hot)
    batch.draft_tokens[:, :2] = batch.target_probs[:, :2].argmax(-1)
    mask = torch.arange(8) % 3 == 0
    if not one_hot:
        batch.draft_probs[mask] = NAN
    batch, mask = batch.to(device), mask.to(device)
    chance = {"seed": 4} if seeds else dict(zip(("uniform_accept", "uniform_sample"), batch[3:5]))
    mixed, without = (sv.verify(*batch[:3], **chance, greedy=greedy, impl=impl) for greedy in (mask, None))
    greedy = sv.verify_greedy(*batch[0:3:2], impl=impl)
    assert all(torch.equal(x, torch.where(mask, y, z)) for x, y, z in zip(mixed, greedy, without))
    assert not torch.equal(mixed.next_token, without.next_token)
    assert equal(sv.verify(*batch[:3], **chance, greedy=mask | True, impl=impl), greedy)


# Sampling


@pytest.mark.parametrize("uniform", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("dtype", SCORES[:3])
def test_sample_is_the_draw_of_verify(dtype, uniform, impl, device):
    """600 entries are two chunks."""
    g = torch.Generator().manual_seed(2)
    probs, u = torch.softmax(2 * torch.randn(8, 600, generator=g), -1).to(dtype), uniforms((8,), uniform, g)
    tokens = sv.sample(probs.to(device), u.to(device), impl=impl)
    assert tokens.tolist() == rule.sample(probs, u)
    none = torch.empty(8, 0, dtype=torch.int64)
    verified = sv.verify(
        *(x.to(device) for x in (none, probs[:, None, :][:, :0], probs[:, None], none.to(uniform), u[:, None])), impl=impl
    )
    assert torch.equal(tokens, verified.next_token)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (2, 0, 3), (2, 1, 2)], ids=str)
def test_sample_shapes(shape, impl, device):
    g = torch.Generator().manual_seed(3)
    probs, u = torch.rand(*shape, 40, generator=g), uniforms(shape, torch.int64, g)
    n = u.numel()
    expected = torch.tensor(rule.sample(probs.reshape(n, 40), u.reshape(n)), dtype=torch.int64).view(shape)
    probs, u, expected = probs.to(device), u.to(device), expected.to(device)
    assert torch.equal(sv.sample(probs, u, impl=impl), expected)
    out = torch.empty(shape, dtype=torch.int32, device=device)
    assert sv.sample(probs, u, out=out, impl=impl) is out and torch.equal(out.long(), expected)
    assert sv.sample(probs, u, dtype=torch.int32, impl=impl).dtype == torch.int32
    seeds = uniforms(shape, torch.int64, g).to(device)
    flat = sv.sample(probs.reshape(n, 40), seed=seeds.reshape(n), offset=1, impl=impl)
    assert torch.equal(sv.sample(probs, seed=seeds, offset=1, impl=impl), flat.view(shape))


def test_sample_of_rows_that_are_apart(impl, device):
    """Transposed, and every other row of a wider tensor: leading dimensions that no view can join."""
    g = torch.Generator().manual_seed(4)
    wide, u = torch.rand(3, 4, 50, generator=g).to(device), uniforms((2, 3), torch.int64, g).to(device)
    for probs, uniform in ((wide.transpose(0, 1)[::2, :, 3:43], u), (wide[:, ::2, 3:43], u.t())):
        assert torch.equal(sv.sample(probs, uniform, impl=impl), sv.sample(probs.contiguous(), uniform.contiguous(), impl=impl))


def test_sample_shares_no_draw_with_verify(impl, device, sequences):
    """Of one seed, `sample` and `verify` without drafts take different bits: the tokens of flat rows agree by chance alone."""
    R = sequences(100)
    probs, none = torch.ones(R, 1, 500, device=device), torch.empty(R, 0, dtype=torch.int64, device=device)
    seed = torch.arange(R, device=device)
    verified = sv.verify(none, None, probs, seed=seed, impl=impl).next_token
    sampled = sv.sample(probs[:, 0], seed=seed, impl=impl)
    assert (verified == sampled).sum() <= R // 10
    assert len(set(sampled.tolist())) > R // 2


def chi_square_of_the_loop(device, verify_seed):
    """Draft by `sample` and verify, both by seeds: the chi-square of 2,000 emitted tokens over 16 groups of 32,000 tokens.

    The groups are neighbours, as are the tokens that neighbouring draws give, so what one draw tells of another shows.
    """
    V, draws, share, g = 32000, 2000, 50, torch.Generator().manual_seed(0)
    q, bonus = torch.softmax(2 * torch.randn(2, V, generator=g), -1)
    p = q * (0.3 + 1.4 * torch.randint(2, (V,), generator=g))  # 0.3 q or 1.7 q, so that chance decides
    q, p, bonus = (x.to(device) for x in (q, p / p.sum(), bonus))
    groups = torch.arange(V) * 16 // V
    expected = torch.zeros(16, dtype=torch.float64).index_add_(0, groups, p.cpu().double()) * draws
    counts = torch.zeros(16, dtype=torch.float64)
    seed = torch.arange(share, device=device) - share // 2
    rows = torch.stack([p, bonus]).expand(share, 2, V)
    for step in range(draws // share):
        drafts = sv.sample(q.expand(share, V), seed=seed, offset=step)
        accepted, next_token = sv.verify(drafts[:, None], q.expand(share, 1, V), rows, **verify_seed(seed, step))
        emitted = torch.where(accepted > 0, drafts, next_token).cpu()
        counts += torch.bincount(groups[emitted], minlength=16)
    return float(((counts - expected) ** 2 / expected).sum())


# The 1 - 1e-6 quantile with 15 degrees (Wilson and Hilferty): one false alarm in a million.
QUANTILE = 15 * (1 - 2 / 135 + 4.753 * math.sqrt(2 / 135)) ** 3


def test_drafts_by_sample_and_verify_follow_the_target_at_full_width(device):
    """One seed and offset for both, as an engine has them."""
    assert chi_square_of_the_loop(device, lambda seed, step: {"seed": seed, "offset": step}) < QUANTILE


def test_chi_square_catches_draws_that_are_not_independent(device):
    """Were a draft tested by the bits that drew it, early tokens, which small ones draw, would stand more often."""

    def shared_bits(seed, step):
        drawn, draws = (by_hand(seed.tolist(), [step] * len(seed), 2, x).to(device) for x in (rule.DRAW, rule.SAMPLE))
        return {"uniform_accept": drawn[:, :1], "uniform_sample": draws}

    assert chi_square_of_the_loop(device, shared_bits) > QUANTILE


# What a step emits


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "B, K", [(6, 4), (0, 4), (6, 0), (6, 17)], ids=["some", "no_sequences", "no_drafts", "one_over_a_tile"]
)
def test_emit(B, K, ids, impl, device):
    """accepted is clamped, whatever it holds, and what is not accepted is replaced by the padding, whatever that is."""
    drafts = torch.arange(100, 100 + B * K).view(B, K).to(ids)
    accepted = torch.tensor([0, K, 2, -3, K + 5, 2**31 - 1])[:B].to(ids)
    next_token = torch.arange(B).to(ids)
    on_device = [x.to(device) for x in (drafts, accepted, next_token)]
    for pad in (-1, 0, -100, 2**31 - 1):
        expected = torch.tensor(rule.emit(drafts, accepted, next_token, pad), dtype=ids).view(B, K + 1)
        result = sv.emit(*on_device, pad, impl=impl)
        assert equal([result.cpu()], [expected])
        framed = torch.full((B, K + 3), 77, dtype=torch.int32 if ids == torch.int64 else torch.int64, device=device)
        out = framed[:, 1:-1]
        assert sv.emit(*on_device, pad, out=out, impl=impl) is out
        assert torch.equal(out.cpu(), expected.to(out.dtype)) and (framed[:, [0, -1]] == 77).all()
    wide = torch.empty(B, K + 1, dtype=torch.int64, device=device)  # for a padding that the ids' dtype may not hold
    assert sv.emit(*on_device, 2**40, out=wide, impl=impl).tolist() == rule.emit(drafts, accepted, next_token, 2**40)
    far = [on_device[0], torch.tensor([2**62, -(2**62), 2**32, 1, 2**63 - 1, -(2**63)], device=device)[:B], on_device[2]]
    assert sv.emit(*far, impl=impl).tolist() == rule.emit(*(x.cpu() for x in far))


def test_emit_of_tensors_that_are_strided(impl, device):
    drafts = torch.arange(24, device=device).view(4, 6).t()[::2]  # [3, 4]
    accepted, next_token = torch.tensor([1, 9, 4, 9, 0, 9], device=device)[::2], torch.arange(6, device=device)[::2]
    assert sv.emit(drafts, accepted, next_token, impl=impl).tolist() == rule.emit(drafts, accepted, next_token)


def calls(batch, impl):
    """Each function that verifies, and with bonus tokens too, waiting for its output options."""
    given = with_bonus(batch)._replace(bonus_tokens=torch.arange(len(batch.lengths), device=batch.lengths.device))
    ragged, others = as_ragged(batch), as_ragged(given)
    return [
        lambda **options: sv.verify(*batch[:5], lengths=batch.lengths, **options, impl=impl),
        lambda **options: sv.verify(*given[:5], lengths=batch.lengths, bonus_tokens=given[6], **options, impl=impl),
        lambda **options: sv.verify_varlen(*ragged[:7], **options, impl=impl),
        lambda **options: sv.verify_varlen(*others[:7], **others.options, **options, impl=impl),
        lambda **options: sv.verify_greedy(*batch[0:3:2], lengths=batch.lengths, **options, impl=impl),
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_outputs(dtype, impl, device):
    """The result's dtype, the caller's own tensors of either dtype, and emitted tokens in rows that are apart."""
    batch = random_batch(5, 4, 64)._replace(lengths=torch.tensor([4, 0, 2, 4, 3])).to(device)
    for call in calls(batch, impl):
        plain = call()
        assert all(x.dtype == torch.int64 for x in plain)
        assert equal(call(dtype=dtype), [x.to(dtype) for x in plain])
        out = tuple(torch.empty(5, dtype=d, device=device) for d in (dtype, torch.int64))
        framed = torch.full((5, 7), 77, dtype=dtype, device=device)
        count = torch.empty(5, dtype=dtype, device=device)
        result = call(out=out, num_emitted=count, emitted=framed[:, 1:-1])
        assert isinstance(result, sv.VerifyResult) and result.accepted is out[0] and result.next_token is out[1]
        assert equal(out, (plain.accepted.to(dtype), plain.next_token))
        assert torch.equal(framed[:, 1:-1].long(), sv.emit(batch.draft_tokens, *plain, impl="eager"))
        assert (framed[:, [0, -1]] == 77).all() and torch.equal(count, plain.accepted.to(dtype) + 1)


def contents(batch):
    """The bytes of each tensor, of which NaN equal themselves."""
    tensors = [x for x in (*batch[:7], *batch.options.values()) if isinstance(x, torch.Tensor)]
    return [x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in tensors]


def test_inputs_are_not_written(impl, device, sequences):
    for seed in range(sequences(60)):
        batch = any_ragged(seed).to(device)
        before = contents(batch)
        batch.verify(impl)
        assert equal(contents(batch), before)


# Malformed content harms nobody else

B, K, V = 5, 3, 600  # two chunks
SICK = 2  # the sequence that is spoiled


def fill(name, value, step=1):
    """Every step-th entry of what the sequence has of a tensor."""

    def apply(batch):
        getattr(batch, name)[SICK].view(-1)[::step] = value

    return apply


def scale(name, factor):
    def apply(batch):
        getattr(batch, name)[SICK] *= factor

    return apply


PROBS, UNIFORMS = ("draft_probs", "target_probs"), ("uniform_accept", "uniform_sample")
SPOILS = {
    **{f"{name}-{x}": fill(name, x) for name in PROBS for x in (NAN, INF, -INF, -1.0, 0.0)},
    **{f"{name}-some-{x}": fill(name, x, 10) for name in PROBS for x in (NAN, INF, -1.0)},
    **{f"{name}-times-{x}": scale(name, x) for name in PROBS for x in (100, 1e-6)},
    **{f"{name}-{x}": fill(name, x) for name in UNIFORMS for x in (NAN, INF, -1.0, 1.0)},
    **{f"id-{x}": fill("draft_tokens", x) for x in placeholders(V)},
    **{f"length-{x}": fill("lengths", x) for x in (-1, K + 1, 2**62, -(2**63))},
}


@pytest.mark.parametrize("how", SPOILS.values(), ids=SPOILS)
def test_a_spoiled_sequence_harms_no_neighbour(how, impl, device):
    """It gives a token of the vocabulary itself, and every other sequence gives what it gave."""
    batch = random_batch(B, K, V, uniform=torch.float32)._replace(lengths=torch.tensor([3, 2, 3, 0, 3]))
    well = calls(batch.to(device), impl)
    spoiled = Batch(*(x if x is None else x.clone() for x in batch))
    how(spoiled)
    others = torch.arange(B) != SICK
    for before, after in zip(well, calls(spoiled.to(device), impl)):
        results = [torch.stack(call()).cpu() for call in (before, after)]
        assert torch.equal(results[0][:, others], results[1][:, others])
        accepted, next_token = results[1][:, SICK].tolist()
        assert 0 <= accepted <= K and 0 <= next_token < V


@pytest.mark.parametrize("offset", [-7, 0, 4, 11, 12, 99, 2**40, -(2**63)])
def test_a_spoiled_offset_harms_its_two_sequences_alone(offset, impl, device):
    """An offset before its neighbour, after the next, negative, past the 11 drafts: sequences 1 and 2 meet there."""
    batch = random_batch(B, K, V)._replace(lengths=torch.tensor([3, 2, 3, 0, 3]))
    ragged = as_ragged(batch, emitted=torch.int64)
    spoiled = ragged._replace(cu_drafts=ragged.cu_drafts.clone())
    spoiled.cu_drafts[2] = offset
    before, after = (x.to(device).verify(impl) for x in (ragged, spoiled))
    others = [0, 3, 4]
    assert all(torch.equal(x[others], y[others]) for x, y in zip(before, after))
    accepted, next_token, *_ = after
    assert ((accepted >= 0) & (accepted <= K)).all() and ((next_token >= 0) & (next_token < V)).all()
