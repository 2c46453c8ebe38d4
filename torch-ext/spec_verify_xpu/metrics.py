"""What a serving engine logs of its steps. Plain torch, so it traces as it stands, and nothing waits for the device."""

from typing import NamedTuple, Optional

import torch

from .validation import (
    INTEGERS,
    MAX_DRAFTS,
    PROBABILITIES,
    require,
    require_device,
    require_dimensions,
    require_int,
    require_rows,
)


class Statistics(NamedTuple):
    """Counts of one step or, added by `+` or `sum`, of several. int64, on the device.

    drafted, accepted and emitted are scalars; emitted counts the accepted drafts and one token more for each sequence.
    drafted_at [K] counts the sequences that had a draft at each position, accepted_at [K] those in which it was accepted.
    """

    drafted: torch.Tensor
    accepted: torch.Tensor
    emitted: torch.Tensor
    drafted_at: torch.Tensor
    accepted_at: torch.Tensor

    def __add__(self, other):
        K, other_K = len(self.drafted_at), len(other.drafted_at)
        if K != other_K:
            raise ValueError(f"expected Statistics of the same max_drafts, got {K} and {other_K}")
        return Statistics(*map(torch.add, self, other))

    def __radd__(self, other):
        return self if other == 0 else NotImplemented  # sum begins with 0


def statistics(accepted: torch.Tensor, drafted: torch.Tensor, max_drafts: int) -> Statistics:
    """Count what was drafted, accepted and emitted, in all and by position.

    Parameters
    ----------
    accepted
        What `verify` returned. Shape ``[B]``, int64 or int32.
    drafted
        How many drafts each sequence had: ``lengths``, or ``cu_drafts.diff()``. Shape ``[B]``, int64 or int32, clamped to
        ``[0, max_drafts]``.
    max_drafts
        K, the number of positions.

    Returns
    -------
    Statistics

    Examples
    --------
    The share of drafts that stand at each position, of three sequences with 2, 2 and 1 drafts.

    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> counts = sv.statistics(torch.tensor([2, 0, 1]), torch.tensor([2, 2, 1]), max_drafts=2)
    >>> counts.emitted, counts.accepted_at / counts.drafted_at
    (tensor(6), tensor([0.6667, 0.5000]))
    """
    (B,) = require_dimensions("accepted", accepted, INTEGERS, "[B]")
    require("drafted", drafted, INTEGERS, (B,), "[B]", accepted.device)
    require_int("max_drafts", max_drafts, 0, MAX_DRAFTS)
    position = torch.arange(max_drafts, device=accepted.device)
    drafted_at = (position < drafted[:, None]).sum(0)
    accepted_at = (position < accepted[:, None]).sum(0)
    return Statistics(drafted_at.sum(), accepted_at.sum(), accepted_at.sum() + B, drafted_at, accepted_at)


def logprobs(emitted: torch.Tensor, target_probs: torch.Tensor, cu_drafts: Optional[torch.Tensor] = None) -> torch.Tensor:
    """The log-probability of each emitted token under the target, 0 in the padding, so that a row's sum is that of its tokens.

    A logarithm in floating point: unlike the tokens it may differ in its last bits between devices.

    Parameters
    ----------
    emitted
        Tokens as `emit` or ``emitted=`` give them, in [0, V), padded with negative ids. Shape ``[B, K + 1]``, int64 or int32.
    target_probs
        As `verify` got it, ``[B, K + 1, V]``, or with cu_drafts as `verify_varlen` got it, ``[T + B, V]``.
    cu_drafts
        As `verify_varlen` got it. Shape ``[B + 1]``, int64 or int32.

    Returns
    -------
    torch.Tensor
        ``[B, K + 1]``, float32.

    Examples
    --------
    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> sv.logprobs(torch.tensor([[1, -1]]), torch.tensor([[[0.5, 0.5], [0.25, 0.75]]]))
    tensor([[-0.6931,  0.0000]])
    """
    B, R = require_dimensions("emitted", emitted, INTEGERS, "[B, K + 1]")
    device = emitted.device
    sequence, position = torch.arange(B, device=device)[:, None], torch.arange(R, device=device)
    if cu_drafts is None:
        require_rows("target_probs", target_probs, PROBABILITIES, (B, R), "[B, K + 1, V]")
    else:
        rows, _ = require_dimensions("target_probs", target_probs, PROBABILITIES, "[T + B, V]")
        require_rows("target_probs", target_probs, PROBABILITIES, None, "[T + B, V]")
        require("cu_drafts", cu_drafts, INTEGERS, (B + 1,), "[B + 1]", device)
        if rows < B:
            raise ValueError(f"target_probs: expected a row or more for each of {B} sequences, got {rows}")
    require_device("target_probs", target_probs, device)
    token = emitted.clamp(0, target_probs.shape[-1] - 1)
    if cu_drafts is None:
        p = target_probs[sequence, position, token]
    else:
        first = cu_drafts[:-1, None].clamp(0, rows - B) + sequence
        p = target_probs[(first + position).clamp(max=rows - 1), token]
    return torch.where(emitted >= 0, p.float().log(), 0.0)
