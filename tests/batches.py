"""Inputs for the tests: batches whose drafts are sometimes accepted and sometimes not, plain or hostile."""

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


class Batch(NamedTuple):
    draft_tokens: torch.Tensor
    draft_probs: Optional[torch.Tensor]
    target_probs: torch.Tensor
    uniform_accept: torch.Tensor
    uniform_sample: torch.Tensor
    lengths: Optional[torch.Tensor] = None

    def to(self, device):
        return Batch(*(x if x is None else x.to(device) for x in self))

    def verify(self, impl):
        return sv.verify(*self[:5], lengths=self.lengths, impl=impl)

    def by_rule(self):
        return tuple(torch.tensor(x, dtype=torch.int64) for x in rule.verify(*self))


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


def hostile_batch(B, K, V, seed, one_hot=False):
    """A batch in which anything that has a defined answer may stand: hostile floats, placeholders, odd lengths."""
    g = torch.Generator().manual_seed(seed)
    batch = random_batch(B, K, V, V_draft=max(1, V - V // 3), uniform=torch.float32, seed=seed, one_hot=one_hot)
    values = torch.tensor(HOSTILE)

    def spoil(x, share):
        if x is not None:
            chosen = torch.rand(x.shape, generator=g) < share
            x[chosen] = values[torch.randint(len(HOSTILE), (int(chosen.sum()),), generator=g)].to(x.dtype)

    for x in batch[1:5]:
        spoil(x, 0.2)
    placeholders = torch.tensor([-1, V, 2**31, -(2**63), 2**63 - 1, 2**32])  # the last would be token 0 in 32 bits
    chosen = torch.rand(B, K, generator=g) < 0.1
    batch.draft_tokens[chosen] = placeholders[torch.randint(len(placeholders), (int(chosen.sum()),), generator=g)]
    return batch._replace(lengths=torch.randint(-2, K + 3, (B,), generator=g))


def assert_equals_rule(batch, impl, device):
    expected = batch.by_rule()
    result = batch.to(device).verify(impl)
    for name, got, want in zip(result._fields, result, expected):
        wrong = (got.cpu() != want).nonzero().flatten().tolist()
        assert not wrong, f"{name} of sequences {wrong[:5]}: {got[wrong[:5]].tolist()}, by the rule {want[wrong[:5]].tolist()}"
