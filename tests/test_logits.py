"""Verification from logits: every implementation equals the rule, whose softmax is exact in sum and as near as torch's."""

import dataclasses
import itertools
import math
import os

import pytest
import torch

import spec_verify_xpu as sv
from batches import (
    COLD,
    HOSTILE_LOGITS,
    WARM,
    Batch,
    as_logits,
    as_ragged,
    hostile_logits_batch,
    in_slots,
    logits_batch,
    placeholders,
    random_batch,
    spoil,
    uniforms,
    with_bonus,
)
from spec_verify_xpu import fixed_point, rule
from spec_verify_xpu.gpu import config, launch

INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Each shape is (B, K, V, why). A block is 1,024 logits.
SHAPES = [
    (5, 3, 1, "a vocabulary of one token"),
    (40, 3, 2, "the smallest choice"),
    (40, 5, 100, "inside one block"),
    (4, 2, 1023, "one under a block"),
    (4, 2, 1024, "one block"),
    (4, 2, 1025, "a last block of one entry"),
    (3, 2, 2048, "whole blocks"),
    (3, 2, 2049, "one over whole blocks"),
    (2, 2, 5000, "a few blocks, and most of another"),
    (1, 1, 17000, "more blocks than a tile of 16 holds"),
    (7, 0, 100, "no drafts"),
    (2, 0, 1100, "no drafts, two blocks"),
    (0, 4, 100, "no sequences"),
    (3, 17, 20, "one draft more than the smallest tile of tokens"),
]


@pytest.fixture
def sequences(impl):
    """How many sequences to verify where n would do: few under Triton's interpreter, which takes 50 ms for each row."""
    interpreted = impl == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return lambda n: min(n, max(2, n // 50)) if interpreted else n


def verify(batch, impl, device, **options):
    """By an implementation, on the CPU."""
    batch, options = batch.to(device), {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    options.update(lengths=batch.lengths, bonus_tokens=batch.bonus_tokens, impl=impl)
    return [x.cpu() for x in sv.verify_logits(*batch[:5], **options)]


def by_rule(batch, temperature=1.0, **options):
    return batch.by_rule(temperature=temperature, **options)


def assert_equals_rule(batch, impl, device, **options):
    for got, want in zip(verify(batch, impl, device, **options), by_rule(batch, **options)):
        assert torch.equal(got, want), (got != want).nonzero().flatten().tolist()


@pytest.mark.parametrize("B, K, V, why", SHAPES, ids=lambda x: str(x) if isinstance(x, int) else "")
@pytest.mark.parametrize("kind", ["logits", "one_hot", "bonus"])
def test_shape(B, K, V, why, kind, impl, device, sequences):
    batch = logits_batch(sequences(B), K, V, one_hot=kind == "one_hot", seed=V)
    assert_equals_rule(with_bonus(batch) if kind == "bonus" else batch, impl, device, temperature=0.8)


@pytest.mark.parametrize("V, B", [(3, 1500), (30, 500), (1100, 4)], ids=["few", "one_block", "two_blocks"])
def test_ten_thousand_rows(V, B, impl, device, sequences):
    """Five rows a sequence, 10,020 in all: few tokens, one block, and draws that cross from one block to the next."""
    B = sequences(B)
    batch = logits_batch(B, 2, V, seed=V)
    for temperature in (1.0, torch.tensor(WARM).repeat(B)[:B]):
        assert_equals_rule(batch, impl, device, temperature=temperature)


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["logits", "one_hot"])
@pytest.mark.parametrize("K, V", [(2, 1030), (7, 20), (2, 1056)], ids=["two_stages", "three_stages", "aligned"])
@pytest.mark.parametrize("number", range(3))
def test_every_configuration(number, K, V, one_hot, impl, device, monkeypatch):
    """However few rows there are. In each stage some sequences end, refused or not; the last has a row or two."""
    on = device.type
    configurations = config.LOGITS[on][number : number + 1]
    if not configurations:
        pytest.skip("there are fewer")
    monkeypatch.setitem(config.LOGITS, on, (dataclasses.replace(*configurations, fills=math.inf),))
    batch, g = logits_batch(12, K, V, one_hot=one_hot, seed=K), torch.Generator().manual_seed(0)
    assert_equals_rule(with_bonus(batch), impl, device)
    options = {"greedy": torch.rand(12, generator=g) < 0.3, "seed": torch.arange(12)}
    lengths = torch.randint(-1, K + 2, (12,), generator=g)
    batch = batch._replace(uniform_accept=None, uniform_sample=None, lengths=lengths)
    assert_equals_rule(batch, impl, device, **options)
    if not one_hot:
        batch, slots = slotted(batch)
        assert_equals_rule(batch, impl, device, **options, **slots, draft_temperature=torch.tensor([*WARM, 0.0]))


@pytest.fixture
def launches(device, monkeypatch):
    """A list of what is launched under the interpreter, as if it were on a GPU whose launches overlap, and rows in stages."""
    if device.type != "cpu":
        pytest.skip("test_gpu.py counts what is compiled")
    launched, run = [], launch.launch
    monkeypatch.setattr(launch, "launch", lambda launches, *more: launched.extend(launches) or run(launches, *more))
    facts = launch.DeviceFacts(threads=1, locate_options={"launch_pdl": True}, exact=launch.EXACT)
    monkeypatch.setattr(launch, "device_facts", lambda _: facts)
    return launched


@pytest.mark.parametrize("kind", ["rows", "bonus", "slots"])
def test_warmup_launches_what_calls_do(kind, launches):
    """Else a request would wait for a kernel to be compiled. Three stages, and rows that are aligned and not."""

    def ways():
        return {(x.kernel, x.constants, *sorted(x.options.items())) for x in launches}

    dtypes = {"bonus": {"bonus_tokens": torch.int64}, "slots": {"draft_slots": torch.int64, "draft_temperature": True}}
    sv.warmup("cpu", logits=True, uniforms=torch.float32, **dtypes.get(kind, {}), impl="triton")
    warm = ways()
    launches.clear()
    for V in (20, 48):
        batch = logits_batch(1, 7, V, uniform=torch.float32)
        batch = with_bonus(batch) if kind == "bonus" else batch
        slots = {"draft_slots": torch.zeros(1, dtype=torch.int64), "draft_temperature": 0.5} if kind == "slots" else {}
        sv.verify_logits(*batch[:5], bonus_tokens=batch.bonus_tokens, **slots, impl="triton")
    assert len(launches) == 2 * 8 and ways() <= warm


@pytest.mark.parametrize("one_hot", [False, True], ids=["logits", "one_hot"])
@pytest.mark.parametrize("max_drafts", [0, 1])
def test_no_grid_is_empty(max_drafts, one_hot, launches):
    """The CUDA driver refuses one. None of the drafts counts, so that of rows of drafts alone none is read."""
    batch = logits_batch(2, 1, 20, one_hot=one_hot)
    tokens, draft, target = (x if x is None else x.flatten(0, 1) for x in batch[:3])
    bonus = {"bonus_tokens": torch.tensor([7, 8])}
    sv.verify_logits_varlen(tokens, draft, target[:2], torch.tensor([0, 1, 2]), max_drafts, seed=1, impl="triton", **bonus)
    assert launches and all(min(x.grid) > 0 for x in launches)


@pytest.mark.parametrize("V_draft, V", [(100, 130), (130, 100), (1, 1100), (1100, 1), (1024, 1030), (2100, 1000)])
def test_vocabularies_differ(V_draft, V, impl, device, sequences):
    """Narrower and wider drafts, down to one token, and by a block or more."""
    batch = logits_batch(sequences(12), 2, V, V_draft=V_draft)
    batch.draft_tokens[::2, 1] = V_draft - 1  # which may be past V
    assert_equals_rule(batch, impl, device)


@pytest.mark.parametrize("tokens", [torch.int32, torch.int64])
@pytest.mark.parametrize("uniform", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, uniform, tokens, impl, device, sequences):
    """48 entries keep wide loads of half-precision rows aligned; 47 do not."""
    for V in (48, 47):
        assert_equals_rule(logits_batch(sequences(12), 1, V, dtype=dtype, uniform=uniform, tokens=tokens, seed=V), impl, device)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_dtypes_of_draft_and_target_differ(dtype, impl, device, sequences):
    batch = logits_batch(sequences(12), 3, 48)
    assert_equals_rule(batch._replace(draft_probs=batch.draft_probs.to(dtype)), impl, device)
    assert_equals_rule(batch._replace(target_probs=batch.target_probs.to(dtype)), impl, device)


@pytest.mark.parametrize("temperature", [None, 0, 1, 0.7, 1e-45, 1e-30, 1e30, INF], ids=str)
def test_temperature_that_is_a_number(temperature, impl, device, sequences):
    batch = logits_batch(sequences(24), 1, 40)
    batch.target_probs[::2] = 0  # ties, among which one that is cold but not 0 still draws
    want = by_rule(batch, 1.0 if temperature is None else temperature)
    assert all(map(torch.equal, verify(batch, impl, device, temperature=temperature), want))


@pytest.mark.parametrize("temperature, same", [(1e-50, 2.0**-60), (1e300, 2.0**60), (10**400, 2.0**60), (0.1, 0.1)], ids=str)
def test_numbers_that_no_float32_holds(temperature, same, impl, device, sequences):
    """What is above 0 draws, however small or large, and a number need not be a float32."""
    batch = logits_batch(sequences(24), 1, 40)
    batch.target_probs[::2] = 0
    found = (verify(batch, impl, device, temperature=x) for x in (temperature, torch.full((len(batch.draft_tokens),), same)))
    assert all(map(torch.equal, *found))


def test_temperatures_of_a_tensor(impl, device):
    """One for each sequence, in memory that is not contiguous: what is not above 0 is without chance, NaN too."""
    values = torch.tensor([*WARM, *COLD])
    batch = logits_batch(len(values), 1, 40)
    batch.target_probs[::2] = 0
    assert_equals_rule(batch, impl, device, temperature=torch.stack([values, -values], 1)[:, 0])
    greedy = torch.arange(len(values)) % 2 == 0
    assert_equals_rule(batch, impl, device, temperature=values, greedy=greedy)
    cold, expected = torch.tensor(COLD).repeat(3)[: len(values)], map(torch.tensor, rule.verify_greedy(*batch[0:3:2]))
    assert all(map(torch.equal, verify(batch, impl, device, temperature=cold), expected))


def test_temperature_of_0_is_verify_greedy(impl, device, sequences):
    batch = hostile_logits_batch(sequences(40), 3, 60, seed=3).to(device)
    expected = sv.verify_greedy(batch.draft_tokens, batch.target_probs, lengths=batch.lengths, impl=impl)
    for temperature in (0, 0.0, torch.zeros(len(batch.lengths), device=device)):
        assert all(map(torch.equal, verify(batch, impl, device, temperature=temperature), (x.cpu() for x in expected)))


def slotted(batch, extra=1):
    """(the batch, {"draft_slots"}) with the draft's rows in slots: more than sequences, out of order, with rows to spare."""
    B, K = batch.draft_tokens.shape
    slots = torch.randperm(B + 2, generator=torch.Generator().manual_seed(B))[:B]
    kept = in_slots(batch.draft_probs.flatten(0, 1), [(b * K, K) for b in range(B)], slots, B + 2, K + extra)
    return batch._replace(draft_probs=kept), {"draft_slots": slots}


@pytest.mark.parametrize("kind", ["rows", "bonus", "greedy"])
@pytest.mark.parametrize("V, V_draft", [(60, 60), (1100, 1030)], ids=["one_block", "two_blocks"])
def test_draft_slots(V, V_draft, kind, impl, device):
    """Dense and ragged, with lengths and draft temperatures: the tokens that rows in the order of the batch give."""
    batch = logits_batch(6, 2, V, V_draft)._replace(lengths=torch.tensor([2, 0, 1, 2, 3, -1]))
    batch = with_bonus(batch) if kind == "bonus" else batch
    options = {"greedy": torch.tensor([True, False] * 3)} if kind == "greedy" else {}
    for own in ({}, {"draft_temperature": torch.tensor([0.5, 2.0, 1.0, 0.7, 1.5, NAN])}):
        expected = by_rule(batch, **options, **own)
        kept, slots = slotted(batch)
        assert all(map(torch.equal, by_rule(kept, **options, **own, **slots), expected))
        assert all(map(torch.equal, verify(kept, impl, device, **options, **own, **slots), expected))
        ragged = as_ragged(batch, options={**options, **own, **slots}, emitted=torch.int64, logits=True)
        ragged = ragged._replace(draft_probs=kept.draft_probs)
        accepted, next_token, _, emitted = (x.cpu() for x in ragged.to(device).verify(impl))
        assert torch.equal(accepted, expected[0]) and torch.equal(next_token, expected[1])
        assert torch.equal(emitted, ragged.by_rule()[3])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_slots_are_clamped_and_may_be_shared(dtype, impl, device):
    """Contents are not checked. No memory around the slots is read: there is none."""
    info = torch.iinfo(dtype)
    slots = torch.tensor([[info.min, 2], [-1, 0], [1, 0], [1, 0], [3, 2], [info.max, 0]], dtype=dtype)[:, 0]  # strided
    batch = logits_batch(6, 2, 50)
    batch = batch._replace(draft_probs=batch.draft_probs[:3].contiguous())
    packed = batch._replace(draft_probs=batch.draft_probs[slots.long().clamp(0, 2)])
    assert all(map(torch.equal, verify(batch, impl, device, draft_slots=slots), by_rule(packed)))
    ragged = as_ragged(packed, options={"draft_slots": slots}, logits=True)._replace(draft_probs=batch.draft_probs)
    assert all(map(torch.equal, (x.cpu() for x in ragged.to(device).verify(impl)), by_rule(packed)))


@pytest.mark.parametrize("B, K, extra", [(0, 4, 0), (2, 0, 0), (2, 0, 2)], ids=str)
def test_slots_of_nothing(B, K, extra, impl, device):
    """No sequences, or no drafts, with slots all the same; and drafts of which none counts."""
    batch, slots = slotted(logits_batch(B, K, 30), extra)
    assert_equals_rule(batch, impl, device, **slots, draft_temperature=0.5)
    some = as_ragged(logits_batch(2, 3, 30), logits=True, options={"draft_slots": torch.tensor([4, 0])})
    some = some._replace(draft_probs=torch.empty(5, 1, 30), max_drafts=0)
    assert all(map(torch.equal, (x.cpu() for x in some.to(device).verify(impl)), some.by_rule()))


@pytest.mark.parametrize("temperature", [None, 0.7, "tensor"], ids=str)
def test_temperature_of_the_draft(temperature, impl, device):
    """What is greedy is the temperature's to say. Of the draft, numbers and entries that are not above 0 count as 2**-60."""
    values = torch.tensor([*WARM, *COLD])
    batch = logits_batch(len(values), 1, 40)
    batch.draft_probs[::3] = 0  # ties, which the coldest shares
    of_all = 1.0 if temperature is None else values.flip(0) if temperature == "tensor" else temperature
    for own in (torch.stack([values, -values], 1)[:, 0], 0, 1e-50, 1e300):
        found = verify(batch, impl, device, temperature=None if temperature is None else of_all, draft_temperature=own)
        assert all(map(torch.equal, found, by_rule(batch, of_all, draft_temperature=own)))
    cold, coldest = (by_rule(batch, draft_temperature=x) for x in (0, 2.0**-60))
    assert all(map(torch.equal, cold, coldest))


def test_halved_logits_at_half_the_temperature(impl, device, sequences):
    """Which makes the same integers, so that nothing but the draft's rows goes by its temperature. Two blocks."""
    batch = logits_batch(sequences(24), 2, 1100)
    halved = batch._replace(draft_probs=batch.draft_probs / 2)
    found = (verify(x, impl, device, temperature=0.8, **own) for x, own in ((batch, {}), (halved, {"draft_temperature": 0.4})))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", ["logits", "one_hot", "bonus"])
@pytest.mark.parametrize("V, B", [(1, 30), (7, 300), (40, 150), (1100, 6)], ids=lambda x: str(x))
def test_hostile_content(V, B, kind, impl, device, sequences):
    batch = hostile_logits_batch(sequences(B), 3, V, seed=V, one_hot=kind == "one_hot")
    batch = with_bonus(batch, torch.int32) if kind == "bonus" else batch
    temperatures = torch.tensor((WARM + COLD) * 20)[: len(batch.draft_tokens)]
    for temperature in (1.0, temperatures):
        assert_equals_rule(batch, impl, device, temperature=temperature)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_half(dtype, impl, device, sequences):
    """All 2**16 values, 256 a row, infinities and NaN among them. Tests and draws see each in some row."""
    rows = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(64, 4, 256)[:: 64 // sequences(64)]
    B, g = len(rows), torch.Generator().manual_seed(0)
    tokens, accept, sample = torch.randint(256, (B, 3), generator=g), *(uniforms((B, n), torch.int64, g) for n in (3, 4))
    batch = Batch(tokens, rows[:, 1:].flip(-1), rows, accept, sample)
    for temperature in (1.0, 1e-3, 1e4):
        assert_equals_rule(batch, impl, device, temperature=temperature)


def rows_of_interest(V):
    """Rows whose blocks and entries are at one end or another. [n, V]"""
    g = torch.Generator().manual_seed(V)
    random_row = 3 * torch.randn(V, generator=g)
    rows = {
        "equal": torch.zeros(V),
        "equal and large": torch.full((V,), 3.4e38),
        "equal and small": torch.full((V,), -3.4e38),
        "infinite": torch.full((V,), INF),
        "masked": torch.full((V,), -INF),
        "not numbers": torch.full((V,), NAN),
        "one-hot": torch.full((V,), -INF).index_fill_(0, torch.tensor(V // 2), -7.0),
        "one infinity": random_row.clone().index_fill_(0, torch.tensor(V - 1), INF),
        "two infinities": random_row.clone().index_fill_(0, torch.tensor([0, V - 1]), INF),
        "peaked": random_row.clone().index_fill_(0, torch.tensor(V // 3), 60.0),
        "two ends": torch.tensor([3.4e38, -3.4e38]).repeat(V)[:V],
        "falling": -torch.arange(V) / 20,
        "rising by single steps": 1 + torch.arange(V) * 2.0**-23,
        "random": random_row,
    }
    for block in range(0, V, 1024):
        masked = random_row.clone()
        masked[block : block + 1024] = -INF
        low = random_row.clone()
        low[block : block + 1024] -= 40
        rows.update({f"block at {block} masked": masked, f"block at {block} low": low})
    return rows


@pytest.mark.parametrize("V", [2, 40, 1500, 2049])
def test_rows_of_interest(V, impl, device):
    """Pairs of them as draft and target, and each as bonus row, with drafts at both ends and in the middle."""
    rows = [*rows_of_interest(V).values()]
    few = V > 100 or impl == "triton"
    pairs = zip(rows, rows[3:] + rows[:3]) if few else itertools.product(rows, rows)
    draft, target = (torch.stack(x)[:, None] for x in zip(*pairs))
    B, g = len(draft), torch.Generator().manual_seed(V)
    tokens = torch.tensor([0, V // 2, V - 1])[torch.randint(3, (B, 1), generator=g)]
    accept, sample = (uniforms((B, n), torch.int64, g) for n in (1, 2))
    assert_equals_rule(Batch(tokens, draft, torch.cat([target, draft], 1), accept, sample), impl, device)


@pytest.mark.parametrize("V", [3, 40, 1030], ids=["few", "one_block", "two_blocks"])
def test_every_entry_of_a_row(V, impl, device):
    """All 44 bits of each: draws at both ends of its interval, and a certain draft at both sides of its probability."""
    row = 4 * torch.randn(V, generator=torch.Generator().manual_seed(V))
    row[1::7] = -INF
    P = torch.tensor(rule.probabilities(row.tolist(), 1.0))
    ids = torch.arange(V)[P > 0]
    if impl == "triton":  # whose interpreter is slow
        ids = ids[:: 1 + len(ids) // 8]
    ends = P.cumsum(0)[ids]
    first, last = ends - P[ids] << 19, (ends << 19) - 1
    rows = row.to(device).expand(len(ids), V)
    for uniform in (first, last):
        assert torch.equal(sv.sample_logits(rows, uniform.to(device), impl=impl).cpu(), ids)

    def accepted(steps):  # a step is the smallest difference of uniforms that a certain draft can see
        steps = steps.clamp(max=rule.ONE - 1)[:, None].to(device) << 19
        target = rows[:, None].expand(-1, 2, -1)
        return sv.verify_logits(ids[:, None].to(device), None, target, steps, steps.expand(-1, 2), impl=impl).accepted.cpu()

    assert accepted(P[ids] - 1).all() and not accepted(P[ids])[P[ids] < rule.ONE].any()


@pytest.mark.parametrize("V", [5, 1500], ids=["one_block", "two_blocks"])
def test_residual_without_mass(V, impl, device, sequences):
    """Equal rows refuse a draft that is masked in both. Nothing is left then, and the target's row is drawn from."""
    batch = logits_batch(sequences(6), 2, V)
    batch.draft_probs[..., V // 2] = -INF
    batch.target_probs[:, :2], batch.target_probs[..., V // 2] = batch.draft_probs, -INF
    batch = batch._replace(draft_tokens=torch.full_like(batch.draft_tokens, V // 2))
    assert_equals_rule(batch, impl, device)
    accepted, next_token = verify(batch, impl, device)
    assert (accepted == 0).all() and (next_token != V // 2).all()


def test_equal_rows_refuse_nothing(impl, device, sequences):
    batch = logits_batch(sequences(40), 4, 30, uniform=torch.float32)
    batch.target_probs[:, :4] = batch.draft_probs
    batch = batch._replace(uniform_accept=torch.full_like(batch.uniform_accept, 1 - 2.0**-24))
    for temperature in (1.0, 0.3, 9.0):
        assert (verify(batch, impl, device, temperature=temperature)[0] == 4).all()


def test_what_is_masked_never_comes(impl, device, sequences):
    """-inf and NaN have probability 0 exactly: neither accepted nor drawn, with the uniforms at their ends too."""
    batch = logits_batch(sequences(300), 3, 30)
    g = torch.Generator().manual_seed(0)
    spoil(batch.target_probs, 0.5, g, [-INF, NAN])
    batch.target_probs[..., 3] = 0
    for x in batch[3:5]:
        spoil(x, 0.3, g, [0, 2**63 - 1])
    accepted, next_token = verify(batch, impl, device)
    emitted = sv.emit(batch.draft_tokens, accepted, next_token)
    rows = batch.target_probs.gather(-1, emitted.clamp(min=0)[..., None])[..., 0]
    assert rows[emitted >= 0].isfinite().all()


def test_lengths_and_options(impl, device):
    """Lengths, greedy, seeds, dtype, out and emitted in a frame, all at once."""
    batch = hostile_logits_batch(12, 4, 60, seed=5)
    temperature, greedy = torch.tensor([*WARM, 0.0]), torch.arange(12) % 3 == 0
    seed, offset = torch.arange(12) - 4, torch.arange(12) ** 9
    accepted, next_token = rule.verify(*batch[:3], None, None, batch.lengths, greedy, seed, offset, temperature)
    out = torch.empty(12, dtype=torch.int32, device=device), torch.empty(12, dtype=torch.int64, device=device)
    framed = torch.full((12, 7), 77, dtype=torch.int32, device=device)
    options = {"lengths": batch.lengths, "greedy": greedy, "seed": seed, "offset": offset, "temperature": temperature}
    result = sv.verify_logits(
        *batch.to(device)[:3], **{n: x.to(device) for n, x in options.items()}, out=out, emitted=framed[:, 1:-1], impl=impl
    )
    assert result.accepted is out[0] and [x.tolist() for x in out] == [accepted, next_token]
    lengths = batch.lengths.clamp(0, 4).tolist()
    rows = [
        rule.emit_sequence(x.tolist()[:n], a, t) + [-1] * (4 - n)
        for x, n, a, t in zip(batch.draft_tokens, lengths, accepted, next_token)
    ]
    assert (framed[:, [0, -1]] == 77).all() and torch.equal(framed[:, 1:-1].long().cpu(), torch.tensor(rows).int().long())


@pytest.mark.parametrize("bonus", [False, True], ids=["rows", "bonus"])
def test_ragged_equals_dense_and_the_rule(bonus, impl, device):
    """The same sequences one behind the other, with seeds and with uniforms. Draws come from either of two blocks."""
    batch = logits_batch(6, 2, 2048)._replace(lengths=torch.tensor([2, 0, 1, 2, 0, 2]))
    batch = with_bonus(batch) if bonus else batch
    temperature = torch.tensor([1.0, 0.5, 0, 1e-45, NAN, 9])
    ragged = as_ragged(batch, options={"temperature": temperature}, emitted=torch.int64, logits=True)
    seeded = ragged._replace(uniform_accept=None, uniform_sample=None, options={**ragged.options, "seed": 3, "offset": 5})
    dense = verify(batch, impl, device, temperature=temperature)
    without = ragged._replace(options={name: x for name, x in ragged.options.items() if name != "temperature"})
    for x in (ragged, seeded, ragged._replace(draft_probs=None), without):
        assert all(map(torch.equal, (y.cpu() for y in x.to(device).verify(impl)), x.by_rule()))
    assert all(map(torch.equal, (y.cpu() for y in ragged.to(device).verify(impl)), dense))
    none = logits_batch(0, 4, 50)
    none = as_ragged(with_bonus(none) if bonus else none, logits=True)
    assert all(map(torch.equal, (x.cpu() for x in none.to(device).verify(impl)), none.by_rule()))


@pytest.mark.parametrize(
    "cu_drafts", [[5, 0, 99, -5, 3, 7, 2], [7] * 7, [0, 2, 0, 2, 0, 2, 7]], ids=["anything", "nothing", "the_same_rows"]
)
@pytest.mark.parametrize("bonus", [False, True], ids=["rows", "bonus"])
def test_offsets_that_are_not_monotone(cu_drafts, bonus, impl, device):
    """Sequences then share rows, each with a temperature of its own."""
    batch = logits_batch(6, 2, 50)._replace(lengths=torch.tensor([2, 0, 1, 2, 0, 2]))
    batch = with_bonus(batch) if bonus else batch
    options = {"temperature": torch.tensor([1.0, 0.5, 0, 1e-45, NAN, 9])}
    ragged = as_ragged(batch, options=options, logits=True)._replace(cu_drafts=torch.tensor(cu_drafts))
    assert all(map(torch.equal, (x.cpu() for x in ragged.to(device).verify(impl)), ragged.by_rule()))


def test_strided_inputs(impl, device):
    """Rows apart and not aligned, axes exchanged, and one row for all."""
    batch = logits_batch(3, 2, 64)
    wide = torch.full((3, 3, 100), NAN)
    wide[..., 5:69] = batch.target_probs
    apart = batch.draft_probs.transpose(0, 1).contiguous().transpose(0, 1)
    expected = verify(batch, impl, device)
    assert all(map(torch.equal, verify(batch, impl, device), by_rule(batch)))
    views = batch.to(device)._replace(draft_probs=apart.to(device), target_probs=wide.to(device)[..., 5:69])
    assert all(map(torch.equal, verify(views, impl, device), expected))
    one = batch.target_probs[:1, :1].expand(3, 3, 64)
    expanded = batch.to(device)._replace(target_probs=one.to(device)[:1, :1].expand(3, 3, 64))
    assert all(map(torch.equal, verify(expanded, impl, device), by_rule(batch._replace(target_probs=one))))


@pytest.mark.parametrize("leading", [(), (7,), (3, 4), (2, 1, 3), (0,), (0, 3)], ids=str)
def test_sample_logits(leading, impl, device):
    """Any leading shape, with uniforms, seeds, temperatures and a tensor to write."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*leading, 50, generator=g)
    temperature = torch.tensor(WARM + COLD)[torch.randint(17, leading, generator=g)]
    rows, R = logits.view(-1, 50), torch.Size(leading).numel()
    uniform = uniforms(leading, torch.int64, g)
    on_device = logits.to(device), uniform.to(device)
    out = torch.empty(leading, dtype=torch.int32, device=device)
    assert sv.sample_logits(*on_device, temperature=temperature.to(device), out=out, impl=impl) is out
    assert out.flatten().tolist() == rule.sample(rows, uniform.flatten(), temperature=temperature.flatten())
    seeded = sv.sample_logits(on_device[0], seed=9, offset=uniform.to(device), temperature=0.6, dtype=torch.int32, impl=impl)
    assert seeded.dtype == torch.int32 and seeded.shape == leading
    assert seeded.flatten().tolist() == rule.sample(rows, None, 9, uniform.flatten(), temperature=0.6)
    greedy = sv.sample_logits(*on_device, temperature=0, impl=impl)
    assert torch.equal(greedy.cpu(), logits.argmax(-1)) or R == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_logits_of_hostile_rows(dtype, impl, device, sequences):
    g = torch.Generator().manual_seed(1)
    for V, R in ((40, sequences(500)), (1030, 5)):  # one block, and two
        rows = torch.randn(R, V, generator=g).to(dtype)
        spoil(rows, 0.1, g, HOSTILE_LOGITS)
        uniform = uniforms((R,), torch.int64, g)
        got = sv.sample_logits(rows.to(device), uniform.to(device), temperature=1.3, impl=impl)
        assert got.tolist() == rule.sample(rows, uniform, temperature=rule.float32(1.3))


def test_what_the_drafter_drew_has_probability(impl, device, sequences):
    """A draft that sample_logits drew is never refused by the row that it came from, nor by one that has more of it."""
    logits = 2 * torch.randn(sequences(200), 1, 40, generator=torch.Generator().manual_seed(0)).to(device)
    seed = torch.arange(len(logits), device=device)
    drafts = sv.sample_logits(logits, temperature=0.7, seed=seed[:, None], impl=impl)
    target = torch.cat([logits, logits], 1)
    assert (sv.verify_logits(drafts, logits, target, temperature=0.7, seed=seed, impl=impl).accepted == 1).all()


def test_the_same_alone_and_in_a_batch(impl, device):
    """With seeds a sequence gets the same tokens wherever it stands."""
    batch = logits_batch(4, 2, 1100).to(device)
    seed, temperature = torch.arange(4, device=device), torch.tensor(WARM[:4], device=device)

    def tokens(index):
        chosen = [x[index] for x in batch[:3]]
        return torch.stack(sv.verify_logits(*chosen, seed=seed[index], temperature=temperature[index], impl=impl))

    whole = tokens(torch.arange(4, device=device))
    assert torch.equal(whole[:, [3, 0]], tokens(torch.tensor([3, 0], device=device)))
    for b in (1, 2):
        assert torch.equal(whole[:, b : b + 1], tokens(torch.tensor([b], device=device)))


def test_flushed_denormals_change_nothing(impl, device):
    """Of logits and of temperatures: 1e-45 is above 0, and ties share."""
    batch = hostile_logits_batch(8, 1, 40, seed=1)
    batch.target_probs[::2, :, 5:] = 1e-45
    temperature = torch.tensor([1e-45, 1.0, 0.0, 2e-45] * 2)
    expected = by_rule(batch, temperature)
    assert torch.set_flush_denormal(True)
    try:
        found = verify(batch, impl, device, temperature=temperature)
    finally:
        torch.set_flush_denormal(False)
    assert all(map(torch.equal, found, expected))


# The softmax itself


def test_probabilities_equal_the_rule(device):
    """fixed_point's, and its single entries: random rows at many temperatures, rows of interest, hostile ones."""
    g = torch.Generator().manual_seed(0)
    for V in (1, 2, 40, 1023, 1024, 1025, 2049, 3500):
        rows = [*rows_of_interest(V).values()] if V > 1 else [torch.zeros(1), torch.full((1,), -INF)]
        for share in (0.02, 0.5, 1):
            rows.append(torch.randn(V, generator=g))
            spoil(rows[-1], share, g, HOSTILE_LOGITS)
        rows = torch.stack(rows)
        temperature = torch.tensor(WARM)[torch.randint(len(WARM), (len(rows),), generator=g)]
        P = fixed_point.probabilities(rows.to(device), temperature.to(device))
        expected = [rule.probabilities(row, T) for row, T in zip(rows.tolist(), temperature.tolist())]
        assert P.tolist() == expected
        ids = torch.randint(V, (5, len(rows)), generator=g)
        entries = fixed_point.probability(rows.to(device).expand(5, -1, -1), temperature.to(device), ids.to(device))
        assert torch.equal(entries.cpu(), P.cpu().expand(5, -1, -1).gather(-1, ids[..., None])[..., 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_with_mass_sums_to_one(dtype, device):
    """2**44 exactly, at every scale and temperature, and nothing for what is masked."""
    g = torch.Generator().manual_seed(0)
    for V, scale in itertools.product((1, 3, 1000, 1025, 32000), (0, 1e-3, 1, 30, 1e4)):
        rows = (scale * torch.randn(40, V, generator=g)).to(dtype)
        spoil(rows[::2], 0.1, g, HOSTILE_LOGITS)
        masked = rows.isnan() | (rows == -INF)
        P = fixed_point.probabilities(rows.to(device), torch.tensor((WARM * 4)[:40], device=device)).cpu()
        assert torch.equal(P.sum(-1), torch.where(masked.all(-1), 0, rule.ONE))
        assert (P >= 0).all() and (P[masked] == 0).all()


def test_bit_length(device):
    """Around every power of two, where float32 rounds up."""
    powers = [2**k + d for k in range(63) for d in (-1, 0, 1)] + [2**63 - 1, 2**62 + 2**61, 2**62 + 2**61 - 1]
    x = [*range(100), *powers]
    assert fixed_point.bit_length(torch.tensor(x, device=device)).tolist() == [y.bit_length() for y in x]


@pytest.mark.parametrize("V, R", [(10, 2000), (1000, 200), (32000, 20), (151936, 6)], ids=lambda x: str(x))
@pytest.mark.parametrize("scale, temperature", [(0, 1), (1, 1), (3, 0.7), (6, 1), (10, 1), (10, 3), (0.1, 0.05)])
def test_as_near_to_the_true_softmax_as_torch(V, R, scale, temperature, device):
    """Mean total variation from a softmax in double precision: at most half as much again as torch's in single."""
    if device.type != "cpu":
        pytest.skip("double precision, on the CPU")
    rows = scale * torch.randn(R, V, generator=torch.Generator().manual_seed(V))
    T = torch.tensor(temperature, dtype=torch.float32)
    exact = torch.softmax(rows.double() / T.double(), -1)

    def distance(x):
        return (x.double() - exact).abs().sum(-1).mean() / 2

    ours = distance(fixed_point.probabilities(rows, T).double() / rule.ONE)
    assert ours <= 1.5 * distance(torch.softmax(rows / T, -1)), (ours, distance(torch.softmax(rows / T, -1)))


def test_placeholders(impl, device):
    """Ids that are no token end the draft: the target's row is drawn from, nothing subtracted."""
    for tokens in (torch.int64, torch.int32):
        ids = placeholders(30, tokens)
        batch = logits_batch(len(ids), 2, 30, tokens=tokens)
        batch.draft_tokens[:, 1] = torch.tensor(ids).to(tokens)
        assert_equals_rule(batch, impl, device)


def test_logits_that_require_grad_are_data(impl, device):
    batch = random_batch(3, 2, 20).to(device)
    draft, target = (as_logits(x).requires_grad_() for x in batch[1:3])
    temperature = torch.ones(3, device=device, requires_grad=True)
    result = sv.verify_logits(batch.draft_tokens, draft, target, *batch[3:5], temperature=temperature, impl=impl)
    assert not any(x.requires_grad for x in result)
    with torch.inference_mode():
        again = sv.verify_logits(batch.draft_tokens, draft, target, *batch[3:5], temperature=temperature, impl=impl)
    assert all(map(torch.equal, result, again))
