"""Inputs for the tests: batches whose drafts are sometimes accepted and sometimes not, plain or hostile, dense or ragged."""

import math
import random
from typing import NamedTuple, Optional

import torch

import spec_verify_xpu as sv
from spec_verify_xpu import rule

# Floats that a rounding, a comparison or a conversion can get wrong, all legal inputs.
HOSTILE = [
    float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 0.0, 1.0, 2.0, 1.5,
    1e-45, 1.2e-38,  # subnormal, smallest normal
    2.0**-44, 2.0**-45, 2.0**-44 * (2 - 2.0**-23),  # the fixed-point step, half of it, just under two of it
    2.0**-22, 2.0**-22 * (1 - 2.0**-24), 2.0**-21 + 2.0**-44,  # where the high limb begins, and both limbs are full
    1 - 2.0**-24, 1 - 2.0**-53, 0.5,
]  # fmt: skip
# Of logits, beside those: the ends of float32, whose differences overflow, subnormals, powers at which a weight ends (2**-33),
# and those at which an exponent is cut (2**-64) or rounded to even.
HOSTILE_LOGITS = [
    *HOSTILE, 1e30, -1e30, 3.4e38, -3.4e38, -1e-45, -1.2e-38,
    *(-x * math.log(2) for x in (0.5, 1.5, 32.5, 33.5, 63.5, 64, 64.5)),
]  # fmt: skip
# Of temperatures: those above 0, and those that are without chance.
WARM = [1.0, 0.7, 3.0, 1e-45, 1e30, math.inf, 1e-3, 100.0, 2.0**-60, 2.0**60, 2.0**-61]
COLD = [0.0, -0.0, -1.0, -1e-45, -math.inf, math.nan]


class Batch(NamedTuple):
    draft_tokens: torch.Tensor
    draft_probs: Optional[torch.Tensor]
    target_probs: torch.Tensor
    uniform_accept: torch.Tensor
    uniform_sample: torch.Tensor
    lengths: Optional[torch.Tensor] = None
    bonus_tokens: Optional[torch.Tensor] = None  # then the target's rows are those of drafts alone

    def to(self, device):
        return Batch(*(x if x is None else x.to(device) for x in self))

    def verify(self, impl):
        return sv.verify(*self[:5], lengths=self.lengths, bonus_tokens=self.bonus_tokens, impl=impl)

    def by_rule(self, **options):
        results = rule.verify(*self[:6], bonus_tokens=self.bonus_tokens, **options)
        return tuple(torch.tensor(x, dtype=torch.int64) for x in results)


def as_logits(rows):
    """Logits of which these are the probabilities."""
    return None if rows is None else rows.float().log().to(rows.dtype)


def with_bonus(batch, dtype=torch.int64):
    """The batch with bonus tokens, which need not be in the vocabulary, in place of the target's last rows."""
    tokens = [-1, 0, 2**31 - 1, -(2**31), 7] if dtype == torch.int32 else [-1, 2**63 - 1, 0, -(2**63), 2**32 + 7]
    bonus_tokens = torch.tensor(tokens * len(batch.draft_tokens), dtype=dtype)[: len(batch.draft_tokens)]
    return batch._replace(target_probs=batch.target_probs[:, :-1], bonus_tokens=bonus_tokens)


def logits_batch(*shape, **options):
    """A random batch whose rows are logits."""
    batch = random_batch(*shape, **options)
    return batch._replace(draft_probs=as_logits(batch.draft_probs), target_probs=as_logits(batch.target_probs))


def in_slots(draft, spans, draft_slots, S, D):
    """Rows [T, V_draft], of which each sequence has those of its span (start, L), in slots [S, D, V_draft] that are apart."""
    memory = draft.new_full((S, D + 1, draft.shape[-1] + 3), float("nan"))
    kept = memory[:, 1:, 2:-1]
    for (start, L), slot in zip(spans, draft_slots.tolist()):
        kept[min(max(slot, 0), S - 1), :L] = draft[start : start + L]
    return kept


def hostile_logits_batch(B, K, V, seed, one_hot=False):
    """As hostile_batch. A third of the rows spoiled in a few entries, a third in a fifth, the others in none."""
    g = torch.Generator().manual_seed(seed)
    batch = logits_batch(B, K, V, V_draft=max(1, V - V // 3), uniform=torch.float32, seed=seed, one_hot=one_hot)
    for x in batch[1:3]:
        for start, share in ((0, 2 / V), (1, 0.2)):
            if x is not None:
                spoil(x[start::3], share, g, HOSTILE_LOGITS)
    spoil(batch.draft_tokens, 0.1, g, placeholders(V))
    return batch._replace(lengths=torch.randint(-2, K + 3, (B,), generator=g))


def random_batch(B, K, V, V_draft=None, dtype=torch.float32, uniform=torch.int64, tokens=torch.int64, seed=0, one_hot=False):
    """Drafts drawn from softmax rows that the target shares in part, so that accepted covers 0 to K."""
    g = torch.Generator().manual_seed(seed)
    V_draft = V_draft or V
    draft_probs = torch.softmax(2 * torch.randn(B, K, V_draft, generator=g), -1)
    target_probs = torch.softmax(2 * torch.randn(B, K + 1, V, generator=g), -1)
    shared = min(V, V_draft)
    target_probs[:, :K, :shared] = 0.8 * draft_probs[..., :shared] + 0.2 * target_probs[:, :K, :shared]
    draft_tokens = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=g).view(B, K) if B * K else torch.empty(B, K)
    return Batch(
        draft_tokens.to(tokens),
        None if one_hot else draft_probs.to(dtype),
        target_probs.to(dtype),
        uniforms((B, K), uniform, g),
        uniforms((B, K + 1), uniform, g),
    )


def uniforms(shape, dtype, generator):
    if dtype == torch.int64:
        return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    return torch.rand(shape, dtype=dtype, generator=generator)


def spoil(x, share, generator, values=HOSTILE):
    """Put some of the values into a share of the entries of x, in place."""
    chosen = torch.rand(x.shape, generator=generator) < share
    values = torch.tensor(values, dtype=torch.float64 if x.is_floating_point() else torch.int64)
    x[chosen] = values[torch.randint(len(values), (int(chosen.sum()),), generator=generator)].to(x.dtype)


def placeholders(V, dtype=torch.int64):
    """Ids that are no token: -1, the first past the vocabulary, the ends of the dtype. The last is token 0 in 32 bits."""
    return [-1, V, 2**31 - 1, -(2**31)] if dtype == torch.int32 else [-1, V, 2**31, -(2**63), 2**63 - 1, 2**32]


def hostile_batch(B, K, V, seed, one_hot=False):
    """A batch in which anything that has a defined answer may stand: hostile floats, placeholders, odd lengths."""
    g = torch.Generator().manual_seed(seed)
    batch = random_batch(B, K, V, V_draft=max(1, V - V // 3), uniform=torch.float32, seed=seed, one_hot=one_hot)
    for x in batch[1:5]:
        if x is not None:
            spoil(x, 0.2, g)
    spoil(batch.draft_tokens, 0.1, g, placeholders(V))
    return batch._replace(lengths=torch.randint(-2, K + 3, (B,), generator=g))


FRAME = 77  # what stands around `emitted`, in the memory that it is a view of


class Ragged(NamedTuple):
    """Sequences one behind the other, as `verify_varlen` takes them."""

    draft_tokens: torch.Tensor  # [T]
    draft_probs: Optional[torch.Tensor]  # [T, V_draft]
    target_probs: torch.Tensor  # [T + B, V]
    cu_drafts: torch.Tensor  # [B + 1]
    max_drafts: int
    uniform_accept: Optional[torch.Tensor] = None  # [T]
    uniform_sample: Optional[torch.Tensor] = None  # [T + B]
    options: dict = {}  # noqa: RUF012 - keyword arguments, those that the rule has as well; nobody writes it
    dtype: torch.dtype = torch.int64  # of the result
    emitted: Optional[torch.dtype] = None  # of the emitted tokens, where they are asked for
    logits: bool = False  # whether the rows are

    @property
    def size(self):
        return len(self.cu_drafts) - 1

    def to(self, device):
        options = {name: moved(x, device) for name, x in self.options.items()}
        return Ragged(*(moved(x, device) for x in self[:7]), options, *self[8:])

    def verify(self, impl):
        """accepted, next_token, and where emitted tokens are asked for how many they are, and they in their frame."""
        verify = sv.verify_logits_varlen if self.logits else sv.verify_varlen
        if self.emitted is None:
            return tuple(verify(*self[:7], **self.options, dtype=self.dtype, impl=impl))
        framed = self.target_probs.new_full((self.size, self.max_drafts + 3), FRAME, dtype=self.emitted)
        outputs = {"num_emitted": framed.new_full((self.size,), FRAME), "emitted": framed[:, 1:-1]}
        result = verify(*self[:7], **self.options, **outputs, dtype=self.dtype, impl=impl)
        return *result, outputs["num_emitted"], framed

    def by_rule(self):
        temperature = {"temperature": 1.0} if self.logits else {}
        accepted, next_token = rule.verify_varlen(*self[:7], **{**temperature, **self.options})
        results = tuple(torch.tensor(x, dtype=torch.int64).to(self.dtype) for x in (accepted, next_token))
        if self.emitted is None:
            return results
        tokens = self.draft_tokens.tolist()
        framed = torch.full((self.size, self.max_drafts + 3), FRAME, dtype=self.emitted)
        for b, (start, L) in enumerate(rule.spans(self.cu_drafts, len(tokens), self.max_drafts)):
            row = rule.emit_sequence(tokens[start : start + L], accepted[b], next_token[b])
            framed[b, 1:-1] = torch.tensor([*row, *[-1] * (self.max_drafts - L)])
        return *results, (results[0] + 1).to(self.emitted), framed


def moved(x, device):
    """x on a device: a tensor in memory laid out as before, so that what was strided or not aligned still is."""
    if not isinstance(x, torch.Tensor):
        return x
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def as_ragged(batch, **more):
    """The sequences of a dense batch, one behind the other: of each only the drafts that count, and one row more or none."""
    B, K = batch.draft_tokens.shape
    lengths = torch.full((B,), K, device=batch.draft_tokens.device) if batch.lengths is None else batch.lengths.clamp(0, K)
    rows = torch.arange(K + 1, device=lengths.device) <= lengths[:, None]  # [B, K + 1]
    drafts = rows[:, 1:]  # position i is a draft where row i + 1 exists
    if batch.bonus_tokens is not None:
        more["options"] = {**more.get("options", {}), "bonus_tokens": batch.bonus_tokens}
    return Ragged(
        batch.draft_tokens[drafts],
        None if batch.draft_probs is None else batch.draft_probs[drafts],
        batch.target_probs[rows if batch.bonus_tokens is None else drafts],
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        K,
        batch.uniform_accept[drafts],
        batch.uniform_sample[rows],
        **more,
    )


FORMATS = 128  # combinations of dtypes and options among random batches, since a GPU's kernels are compiled for each


def any_ragged(seed):
    """A ragged batch that the seed picks from all that `verify_varlen` takes: 0 to 12 sequences of 0 to 16 drafts."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    kind = random.Random(seed % FORMATS)
    logits = random.Random(f"logits {seed % FORMATS}").random() < 0.2
    bonus = random.Random(f"bonus {seed % FORMATS}").choice([None, None, None, torch.int64, torch.int32])
    own, own_kind = random.Random(f"draft {seed}"), random.Random(f"draft {seed % FORMATS}")

    def chance(p, r=r):
        return r.random() < p

    def number():
        return r.choice([uniforms((B,), torch.int64, g), r.randint(-(2**63), 2**63 - 1), r.randint(0, 9)])

    # Mostly small, since the rule is slow; some at and around the 512 entries of a chunk, and past two of them.
    V = r.choice([r.randint(1, 40), r.randint(1, 700), r.randint(500, 1300), r.choice([1, 2, 511, 512, 513, 1024, 1025])])
    V_draft = r.randint(1, V + 20) if chance(0.3) else V
    B, longest = r.choice([(r.randint(0, 6), 3), (r.randint(0, 6), 16), (r.randint(0, 3), 16), (r.randint(8, 12), 16)])
    if logits:  # of which the rule takes 4 us an entry, and Triton's interpreter 50 ms a row
        B, longest = min(B, 4), 3 if V > 100 else longest
    shortest = longest if chance(0.2) else 0  # where all have the same number of drafts, a kernel guesses where they are
    lengths = torch.tensor([r.randint(shortest, longest) for _ in range(B)], dtype=torch.int64)
    uniform, ids = kind.choice([torch.float32, torch.float64, torch.int64]), kind.choice([torch.int64, torch.int32])
    full, half, brain = torch.float32, torch.float16, torch.bfloat16
    draft, target = kind.choice([(full, full), (full, full), (half, half), (brain, brain), (full, half), (brain, full)])
    batch = random_batch(B, longest, V, V_draft, uniform=uniform, tokens=ids, seed=seed, one_hot=chance(0.25, kind))
    batch = batch._replace(target_probs=batch.target_probs.to(target), lengths=lengths)
    if batch.draft_probs is not None:
        batch = batch._replace(draft_probs=batch.draft_probs.to(draft))

    options = {}
    if chance(0.4, kind):  # most drafts of a greedy sequence are the target's choice
        options["greedy"] = torch.rand(B, generator=g) < 0.5
        chosen = options["greedy"][:, None] & (torch.rand(B, longest, generator=g) < 0.97)
        best = batch.target_probs[:, :-1].argmax(-1).to(ids)
        batch = batch._replace(draft_tokens=torch.where(chosen, best, batch.draft_tokens))
    ragged = as_ragged(with_bonus(batch, bonus) if bonus else batch)
    options.update(ragged.options)
    if chance(0.4, kind):
        options["seed"] = number()
        if chance(0.7):
            options["offset"] = number()
        ragged = ragged._replace(uniform_accept=None, uniform_sample=None)

    if chance(0.4):
        for x in (ragged.draft_probs, ragged.target_probs, ragged.uniform_accept, ragged.uniform_sample):
            if x is not None and x.is_floating_point() and chance(0.5):
                spoil(x, r.choice([0.01, 0.2]), g)
        spoil(ragged.draft_tokens, r.choice([0, 0.05]), g, placeholders(V_draft, ids))
    cu_drafts, T = ragged.cu_drafts.to(ids), len(ragged.draft_tokens)
    if chance(0.2):  # not monotone, negative, beyond T
        spoil(cu_drafts, r.choice([0.2, 1]), g, [r.randint(-2, T + 2), *placeholders(T, ids)])
    for name in ("draft_probs", "target_probs"):
        x = getattr(ragged, name)
        if x is not None and chance(0.3, kind):  # rows that are apart, and not aligned
            left, right = r.randint(0, 3), r.randint(0, 3)
            wide = torch.nn.functional.pad(x, (left, right), value=float("nan"))
            ragged = ragged._replace(**{name: wide[:, left : left + x.shape[1]]})
    if logits:
        for x in (ragged.draft_probs, ragged.target_probs):
            if x is not None:
                x.copy_(as_logits(x))
                spoil(x, r.choice([0, 0, 0.01, 0.2]), g, HOSTILE_LOGITS)
        if chance(0.5, kind):
            temperatures = torch.tensor([r.choice(WARM if chance(0.8) else COLD) for _ in range(B)], dtype=torch.float32)
            options["temperature"] = temperatures if chance(0.7) else r.choice([0, *WARM])
    dtype, emitted = kind.choice(
        [(torch.int64, None), (torch.int64, torch.int64), (torch.int32,) * 2, (torch.int64, torch.int32)]
    )
    max_drafts = r.choice([longest, int(lengths.max()) if B else 0, r.randint(0, 20)])
    if logits and ragged.draft_probs is not None:
        if chance(0.5, own_kind):
            temperatures = torch.tensor([own.choice(WARM + COLD) for _ in range(B)], dtype=torch.float32)
            options["draft_temperature"] = temperatures if chance(0.7, own) else own.choice([0, *WARM])
        if chance(0.5, own_kind):  # out of order, shared, out of range
            S, D, ends = own.randint(1, B + 2), min(max(max_drafts, 1), T) + own.randint(0, 2), placeholders(B, ids)
            draft_slots = [own.choice(ends) if chance(0.1, own) else own.randrange(S) for _ in range(B)]
            options["draft_slots"] = torch.tensor(draft_slots, dtype=ids)
            kept = in_slots(ragged.draft_probs, rule.spans(cu_drafts, T, max_drafts), options["draft_slots"], S, D)
            ragged = ragged._replace(draft_probs=kept)
    return ragged._replace(
        cu_drafts=cu_drafts,
        max_drafts=max_drafts,
        options=options,
        dtype=dtype,
        emitted=emitted,
        logits=logits,
    )


def assert_equals_rule(batch, impl, device):
    expected = batch.by_rule()
    result = batch.to(device).verify(impl)
    for name, got, want in zip(result._fields, result, expected):
        wrong = (got.cpu() != want).nonzero().flatten().tolist()
        assert not wrong, f"{name} of sequences {wrong[:5]}: {got[wrong[:5]].tolist()}, by the rule {want[wrong[:5]].tolist()}"
