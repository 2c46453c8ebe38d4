"""The public functions: what a user calls, checked before anything runs."""

from typing import NamedTuple, Optional

import torch

from .ops import ops, require_implementation
from .validation import validate_verify


class VerifyResult(NamedTuple):
    """accepted [B], how many drafts stand, in [0, K]; next_token [B], the token that follows them. Both int64."""

    accepted: torch.Tensor
    next_token: torch.Tensor


def verify(
    draft_tokens: torch.Tensor,
    draft_probs: Optional[torch.Tensor],
    target_probs: torch.Tensor,
    uniform_accept: Optional[torch.Tensor] = None,
    uniform_sample: Optional[torch.Tensor] = None,
    *,
    lengths: Optional[torch.Tensor] = None,
    generator: Optional[torch.Generator] = None,
    impl: str = "auto",
) -> VerifyResult:
    """Verify K speculative drafts for each of B sequences, and draw the token that follows the accepted ones.

    Draft token t is accepted with probability min(1, p(t) / q(t)), where q is the draft's distribution and p the
    target's. The first rejected position draws from the normalised residual max(0, p - q); if all stand, the bonus token
    is drawn from the target's last row. The output follows the target's distribution (Leviathan et al. 2023, algorithm 1;
    Chen et al. 2023, algorithm 2). The arithmetic is on integers, so every implementation and device gives the same
    tokens for the same uniforms; rule.py states it. Inputs are never written, and nothing waits for the device.

    Parameters
    ----------
    draft_tokens
        Drafted token ids. Shape ``[B, K]``, int64 or int32. An id outside ``[0, V_draft)``, such as a -1 that pads, ends
        the draft there: the next token is drawn from the target's row, nothing subtracted. K is at most 2**14.
    draft_probs
        The distributions that the drafts were drawn from. Shape ``[B, K, V_draft]``, float32, float16 or bfloat16, rows
        that sum to 1, last dimension contiguous. None for drafts without probabilities (n-gram, prompt lookup): each
        draft then counts as certain.
    target_probs
        The target's distributions at each draft and after the last. Shape ``[B, K + 1, V]``, likewise. V may differ from
        V_draft; a token outside a vocabulary has probability 0 there. Both are at most 2**19 - 1.
    uniform_accept
        Randomness of the acceptance tests. Shape ``[B, K]``, float32 or float64 in ``[0, 1)``, or int64 random bits, of
        which 63 are used. None: 63 bits each are drawn here. A float32 resolves 2**-24, so pass int64 where that matters.
    uniform_sample
        Randomness of the draws, one for each position where the draft can end. Shape ``[B, K + 1]``, dtype as above.
    lengths
        How many of each sequence's drafts count. Shape ``[B]``, int64 or int32, clamped to ``[0, K]``. None: all K.
    generator
        The source of the uniforms that are drawn here. None: the device's default. torch cannot trace a generator: with
        ``torch.compile(fullgraph=True)`` it is an error of torch's.
    impl
        "triton", "numba" (CPU), "eager" (vectorised torch) or "reference" (rule.py), which never fall back to another;
        "auto" takes Triton on a GPU and Numba on the CPU where they are installed, and eager elsewhere.

    Returns
    -------
    VerifyResult
        accepted ``[B]`` in ``[0, K]`` and next_token ``[B]`` in ``[0, V)``, int64. A row without any mass gives token 0.

    Raises
    ------
    TypeError
        An argument of the wrong type or dtype.
    ValueError
        A wrong shape, device or stride, or an implementation that is unknown or cannot run on these tensors.

    Examples
    --------
    Token 1 stands, since the target likes it more than the draft did. Token 0 does not: the target never says it, so the
    next token comes from what the target has beyond the draft, which is all on token 2.

    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> draft = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    >>> target = torch.tensor([[[0.25, 0.75, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]])
    >>> sv.verify(torch.tensor([[1, 0]]), draft, target)
    VerifyResult(accepted=tensor([1]), next_token=tensor([2]))
    """
    validate_verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths, generator)
    require_implementation(impl)
    if uniform_accept is None:
        uniform_accept = random_bits(draft_tokens.shape, target_probs.device, generator)
    if uniform_sample is None:
        uniform_sample = random_bits(target_probs.shape[:2], target_probs.device, generator)
    return VerifyResult(*ops.verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths, impl))


def random_bits(shape, device, generator):
    """63 random bits for each entry of an int64 tensor."""
    bits = torch.empty(shape, dtype=torch.int64, device=device)
    if torch.compiler.is_compiling() and generator is None:  # it knows the functional form only, ten times slower elsewhere
        return torch.ops.aten.random(bits)
    return bits.random_(generator=generator)


def check(
    draft_tokens: torch.Tensor,
    draft_probs: Optional[torch.Tensor],
    target_probs: torch.Tensor,
    uniform_accept: Optional[torch.Tensor] = None,
    uniform_sample: Optional[torch.Tensor] = None,
    *,
    lengths: Optional[torch.Tensor] = None,
) -> None:
    """Check the contents of `verify`'s arguments, which `verify` itself does not read ahead (that would wait for the device).

    Every probability row that `lengths` lets count must be finite, not negative, and sum to 1 within what rounding to its
    dtype and a float32 softmax can cost: 1e-4 in float32, 2**-7 in bfloat16, 2**-10 + V * 2**-25 in float16. Float
    uniforms must lie in [0, 1). Ids are not checked: one outside the vocabulary is a placeholder.

    Raises
    ------
    TypeError, ValueError
        As `verify`, and ValueError with the index of the first row that is wrong.
    """
    validate_verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths, None)
    B, K = draft_tokens.shape
    counted = torch.full((B,), K, device=target_probs.device) if lengths is None else lengths.clamp(0, K)
    for name, probs, rows in (("draft_probs", draft_probs, counted), ("target_probs", target_probs, counted + 1)):
        if probs is not None:
            check_rows(name, probs, torch.arange(probs.shape[1], device=probs.device) < rows[:, None])
    for name, uniforms in (("uniform_accept", uniform_accept), ("uniform_sample", uniform_sample)):
        if uniforms is not None and uniforms.is_floating_point():
            report_first(name, ~((uniforms >= 0) & (uniforms < 1)), uniforms, "a uniform in [0, 1)")


def check_rows(name, probs, counted):
    """Raise for the first row of probs [B, rows, V], of those that are counted [B, rows], that is no distribution."""
    info = torch.finfo(probs.dtype)
    tolerance = max(1e-4, info.eps) + probs.shape[2] * info.smallest_normal * info.eps / 2
    sums = probs.sum(-1, dtype=torch.float32)
    report_first(name, counted & ~probs.isfinite().all(-1), sums, "finite entries, in a row that sums to 1")
    report_first(name, counted & (probs < 0).any(-1), probs.amin(-1), "no negative entry")
    report_first(name, counted & ((sums - 1).abs() > tolerance), sums, f"a row that sums to 1 within {tolerance:.1e}")


def report_first(name, wrong, values, expected):
    if wrong.any():
        index = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}{index}: expected {expected}, got {values[tuple(index)].item()}")
