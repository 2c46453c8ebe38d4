"""The rule in vectorised torch, on any device: no loop over batch, drafts or vocabulary, no fp64, no host synchronisation."""

import torch

from .fixed_point import bits, fixed, scale, unit
from .rule import ONE

CHUNK = 512  # entries of a row that are summed before they are searched


@torch.no_grad()
def verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths):
    """Arguments as in `api.verify`, validated, uniforms given. Returns accepted [B] and next_token [B], int64."""
    (B, K), V = draft_tokens.shape, target_probs.shape[-1]
    sequence = torch.arange(B, device=target_probs.device)
    tokens = draft_tokens.long()
    V_draft = V if draft_probs is None else draft_probs.shape[-1]

    is_draft = (tokens >= 0) & (tokens < V_draft)  # [B, K]
    if lengths is not None:
        is_draft &= torch.arange(K, device=tokens.device) < lengths[:, None]
    p = probability_of(tokens, target_probs[:, :K])
    q = ONE if draft_probs is None else probability_of(tokens, draft_probs)
    is_accepted = is_draft & (scale(bits(uniform_accept), q) < p)
    accepted = is_accepted.long().cumprod(1).sum(1)  # [B]

    # Past the last draft there is nothing to subtract, nor where a placeholder ended the draft.
    end = accepted[:, None]
    rejected = torch.nn.functional.pad(is_draft, (0, 1)).gather(1, end)  # [B, 1]
    p_row = unit(target_probs[sequence, accepted])  # [B, V]
    weights = in_chunks(p_row * float(ONE))  # [B, chunks, CHUNK]
    if draft_probs is None:
        token = torch.nn.functional.pad(tokens, (0, 1)).gather(1, end).clamp(0, V - 1)
        own = weights.flatten(1)
        own.scatter_(1, token, own.gather(1, token) * ~rejected)
    elif K > 0:
        width = min(V, V_draft)
        q_row = unit(draft_probs[sequence, accepted.clamp(max=K - 1), :width])
        overlap = torch.minimum(p_row[:, :width], q_row)  # fixed() is monotone: p - min(p, q) is max(0, p - q)
        weights.flatten(1)[:, :width].sub_(overlap.mul_(rejected * float(ONE)).long())

    sums = weights.sum(-1)  # [B, chunks]
    no_residual = sums.sum(1, keepdim=True) == 0
    if no_residual.device.type != "cpu" or no_residual.any():  # to ask would wait for a GPU; on the CPU it saves the work
        weights = torch.where(no_residual[..., None], in_chunks(p_row * float(ONE)), weights)
        sums = weights.sum(-1)
    total = sums.sum(1, keepdim=True)  # [B, 1]
    threshold = scale(bits(uniform_sample).gather(1, end), total)

    chunk, before = first_above(sums, threshold, 0)
    found = weights.gather(1, chunk[:, None].expand(B, 1, CHUNK))[:, 0]  # [B, CHUNK]
    entry, _ = first_above(found, threshold, before)
    return accepted, torch.where(total > 0, chunk * CHUNK + entry, 0)[:, 0]


def probability_of(tokens, probs):
    """fixed(probs[b, i, tokens[b, i]]), 0 where the id is outside the vocabulary. [B, K] -> [B, K]."""
    V = probs.shape[-1]
    p = fixed(probs.gather(-1, tokens.clamp(0, V - 1)[..., None])[..., 0])
    return torch.where(tokens < V, p, 0)


def in_chunks(row):
    """[B, V] of floats -> [B, ceil(V / CHUNK), CHUNK] int64, zeros past the vocabulary."""
    B, V = row.shape
    chunks = row.new_zeros((B, -(-V // CHUNK), CHUNK), dtype=torch.int64)
    chunks.flatten(1)[:, :V] = row
    return chunks


def first_above(weights, threshold, before):
    """Where the running sum of each row [B, n], counted from `before`, passes the threshold, and the sum before. Two [B, 1]."""
    cumulative = weights.cumsum(1) + before
    index = (cumulative <= threshold).sum(1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return index, (cumulative - weights).gather(1, index)
