"""The rule in vectorised torch, on any device: no loop over batch, drafts or vocabulary, no fp64, no host synchronisation."""

import torch

from .fixed_point import bits, fixed, scale, scaled_
from .rule import ONE

CHUNK = 512  # entries of a row that are summed before they are searched


@torch.no_grad()
def verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths):
    """Arguments as in `api.verify`, validated, uniforms given. Returns accepted [B] and next_token [B], int64."""
    (B, K), V = draft_tokens.shape, target_probs.shape[-1]
    tokens = draft_tokens.long()
    V_draft = V if draft_probs is None else draft_probs.shape[-1]

    is_draft = (tokens >= 0) & (tokens < V_draft)  # [B, K]
    if lengths is not None:
        is_draft &= torch.arange(K, device=tokens.device) < lengths[:, None]
    p = probability_of(tokens, target_probs[:, :K])
    q = ONE if draft_probs is None else probability_of(tokens, draft_probs)
    is_accepted = is_draft & (scale(bits(uniform_accept), q) < p)
    if V_draft > V:
        is_accepted &= tokens < V  # elsewhere p is 0
    accepted = is_accepted.long().cumprod(1).sum(1)  # [B]

    # fixed() is monotone, so the weight max(0, p - q) is p - min(p, q), in sums as in entries.
    end = accepted[:, None]
    rejected = torch.nn.functional.pad(is_draft, (0, 1)).gather(1, end)  # [B, 1]
    p_row = scaled_(row_of(target_probs, accepted).float())  # [B, V]
    if draft_probs is None or K == 0:
        token = torch.nn.functional.pad(tokens, (0, 1)).gather(1, end)
        q_row = torch.zeros_like(p_row).scatter_(1, token.clamp(0, V - 1), float(ONE))
    else:
        q_row = scaled_(row_of(draft_probs, accepted.clamp(max=K - 1)).float())[:, :V]
    width = q_row.shape[1]
    overlap = torch.minimum(q_row, p_row[:, :width], out=q_row)  # [B, width]
    entries = p_row.new_empty((B, -(-V // CHUNK), CHUNK), dtype=torch.int64)
    target_sums, overlap_sums = chunk_sums(p_row, entries), chunk_sums(overlap, entries)  # [B, chunks]
    # Nothing is subtracted where a placeholder or no draft ended the row, nor where that would leave nothing.
    subtract = (rejected & ((target_sums - overlap_sums).sum(1, keepdim=True) > 0)).long()  # [B, 1]
    sums = target_sums - overlap_sums * subtract
    total = sums.sum(1, keepdim=True)
    threshold = scale(bits(uniform_sample).gather(1, end), total)

    chunk, before = first_above(sums, threshold, 0)
    at = chunk * CHUNK + torch.arange(CHUNK, device=chunk.device)  # [B, CHUNK]
    weights = entries_at(p_row, at) - entries_at(overlap, at) * subtract
    entry, _ = first_above(weights, threshold, before)
    return accepted, torch.where(total > 0, chunk * CHUNK + entry, 0)[:, 0]


def probability_of(tokens, probs):
    """fixed(probs[b, i, tokens[b, i]]) where the id is inside the vocabulary, else anything. [B, K] -> [B, K]."""
    return fixed(probs.gather(-1, tokens.clamp(0, probs.shape[-1] - 1)[..., None])[..., 0])


def row_of(x, index):
    """x[b, index[b]] for each b: [B, n, m] -> [B, m]."""
    B, n, _ = x.shape
    sequence = torch.arange(B, device=x.device)
    if x.is_contiguous():  # half the time of the general form
        return x.flatten(0, 1).index_select(0, sequence * n + index)
    return x[sequence, index]


def chunk_sums(row, entries):
    """The sum of each chunk of a scaled row [B, n]: [B, chunks] int64. `entries` is memory to cut it in."""
    n = row.shape[1]
    entries.flatten(1)[:, :n] = row
    entries.flatten(1)[:, n:] = 0
    return entries.sum(-1)


def entries_at(row, at):
    """Entries [B, m] of a row [B, n] as int64, 0 past its end."""
    n = row.shape[1]
    return row.gather(1, at.clamp(max=n - 1)).long() * (at < n)


def first_above(weights, threshold, before):
    """Where the running sum of each row [B, n], counted from `before`, passes the threshold, and the sum before. Two [B, 1]."""
    cumulative = weights.cumsum(1) + before
    index = (cumulative <= threshold).sum(1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return index, (cumulative - weights).gather(1, index)
