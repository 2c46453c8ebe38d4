"""The rule in vectorised torch, on any device: no loop over batch, drafts or vocabulary, no fp64, no host synchronisation."""

import torch

from .fixed_point import bits, fixed, order, probabilities, probability, scale, scaled_
from .rule import ACCEPT, random_bits

CHUNK = 512  # entries of a row that are summed before they are searched


@torch.inference_mode()  # in which small operations take less time than without gradients
def verify(call):
    """See ops.Call. Drafts and rows are found by two indices: a sequence, and a position in it.

    A ragged batch is one sequence of all drafts, in which each of its own starts somewhere.
    """
    (B,), K = call.accepted.shape, call.max_drafts
    if call.logits and call.temperature is None:
        call = call._replace(temperature=torch.full_like(call.accepted, call.one_temperature, dtype=torch.float32))
    heat = call.draft_temperature  # of which what is not above 0, NaN too, counts as the least that is
    call = call._replace(draft_temperature=call.temperature if heat is None else torch.where(heat > 0, heat, 0))
    sequence = torch.arange(B, device=call.accepted.device)[:, None]  # [B, 1]
    if call.cu_drafts is None:
        start = first_row = first_draw = 0
        length = K if call.lengths is None else call.lengths[:, None]
        drafts = rows = slice(None), slice(K)  # views, where a ragged batch needs gathers
    else:
        names = ["draft_tokens", "target_probs", "uniform_accept", "uniform_sample"]
        if call.draft_slots is None:
            names.append("draft_probs")
        call = call._replace(**{name: x[None] for name in names if (x := getattr(call, name)) is not None})
        T = call.draft_tokens.shape[1]
        K = min(K, T)
        offsets = call.cu_drafts.long().clamp(0, T)[:, None]
        start, length = offsets[:-1], offsets.diff(dim=0)  # [B, 1]
        sequence, first_draw = torch.zeros_like(sequence), start + sequence
        first_row = first_draw if call.bonus_tokens is None else start
    position = torch.arange(K, device=sequence.device)
    counts = position < length  # [B, K] or [K]
    if call.cu_drafts is not None:
        drafts = sequence, within(start + position, call.draft_tokens)  # indices of [B, K]
        rows = sequence, within(first_row + position, call.target_probs)
    tokens = call.draft_tokens[drafts].long()

    if call.all_greedy:
        accepted, next_token = verify_greedily(call, tokens, counts, sequence, first_row)
    else:
        accepted, next_token = verify_randomly(call, tokens, counts, drafts, rows, sequence, start, first_row, first_draw)
        greedy = call.greedy
        if call.logits:
            cold = order(call.temperature) <= 0  # NaN too
            greedy = cold if greedy is None else greedy | cold
        if greedy is not None:
            greedily = verify_greedily(call, tokens, counts, sequence, first_row)
            accepted, next_token = (torch.where(greedy, *x) for x in zip(greedily, (accepted, next_token)))
    if call.bonus_tokens is not None:
        next_token = torch.where(accepted == counts.sum(-1), call.bonus_tokens, next_token)
    call.accepted.copy_(accepted)
    call.next_token.copy_(next_token)
    if call.num_emitted is not None:
        call.num_emitted.copy_(accepted + 1)
    if call.emitted is not None:
        tokens = torch.nn.functional.pad(tokens, (0, call.max_drafts - K))
        emit(tokens, accepted, next_token, -1, call.emitted)


def verify_randomly(call, tokens, counts, drafts, rows, sequence, start, first_row, first_draw):
    """accepted [B] and next_token [B]."""
    draft_probs, target_probs, V = call.draft_probs, call.target_probs, call.target_probs.shape[-1]
    V_draft = V if draft_probs is None else draft_probs.shape[-1]

    ids = tokens.clamp(0, V_draft - 1)  # [B, K]
    is_draft = (ids == tokens) & counts
    slot, draft_start, draft_rows = sequence, start, drafts
    if call.draft_slots is not None:
        slot, draft_start = call.draft_slots.long().clamp(0, len(draft_probs) - 1)[:, None], 0
        draft_rows = slot[:, 0], slice(tokens.shape[1])
    if call.seed is None:
        accept = bits(call.uniform_accept[drafts])
    else:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        accept = random_bits(call.seed[:, None], call.offset[:, None], position, ACCEPT)
    p = entries_of(target_probs, call.temperature, rows, ids if V_draft <= V else ids.clamp(max=V - 1))
    if draft_probs is None:
        is_accepted = is_draft & (accept >> 19 < p)  # scale(accept, ONE), in one operation
    else:
        is_accepted = is_draft & (scale(accept, entries_of(draft_probs, call.draft_temperature, draft_rows, ids)) < p)
    if V_draft > V:
        is_accepted &= tokens < V  # elsewhere p is 0
    end = is_accepted.cumprod(1).sum(1, keepdim=True)  # [B, 1]

    # The weight max(0, p - q) is p - min(p, q), in sums as in entries, and in scaled rows too, since fixed() is monotone.
    rejected = torch.nn.functional.pad(is_draft, (0, 1)).gather(1, end)  # [B, 1]
    row = first_row + end
    if call.bonus_tokens is not None:
        row = within(row, target_probs)  # where all drafts stand there may be none, and nothing is drawn
    p_row = row_of(target_probs, call.temperature, sequence, row)  # [B, V]
    entries = p_row.new_empty((2, len(p_row), -(-V // CHUNK), CHUNK), dtype=torch.int64)  # of p and of min(p, q)
    p_entries, overlap = entries.flatten(2)
    p_entries[:, :V] = p_row
    p_entries[:, V:] = 0
    if draft_probs is None or tokens.shape[1] == 0:  # then min(p, q) is p at the draft, and 0 elsewhere
        token = torch.nn.functional.pad(tokens, (0, 1)).gather(1, end).clamp_(0, V - 1)
        overlap.zero_().scatter_(1, token, p_entries.gather(1, token))
    else:
        width = min(V, V_draft)
        q_row = row_of(draft_probs, call.draft_temperature, slot, within(draft_start + end, draft_probs))[:, :width]
        overlap[:, :width] = torch.minimum(q_row, p_row[:, :width], out=q_row)
        overlap[:, width:] = 0
    # Nothing is subtracted where a placeholder or no draft ended the row, nor where that would leave nothing.
    target_sums, overlap_sums = entries.sum(-1)  # [B, chunks] each
    residual_sums = target_sums - overlap_sums
    subtract = rejected & (residual_sums.sum(1, keepdim=True) > 0)  # [B, 1]
    sums = torch.where(subtract, residual_sums, target_sums)
    total = sums.sum(1, keepdim=True)
    if call.seed is None:
        sample = bits(call.uniform_sample[sequence, first_draw + end])
    else:
        sample = random_bits(call.seed[:, None], call.offset[:, None], end, call.purpose)
    threshold = scale(sample, total)

    cumulative = sums.cumsum(1)
    chunk = first_above(cumulative, threshold)
    threshold -= (cumulative - sums).gather(1, chunk)
    weights, overlap = entries.gather(2, chunk[:, :, None].expand(2, -1, -1, CHUNK))[:, :, 0]  # [B, CHUNK] each
    entry = first_above(torch.where(subtract, weights - overlap, weights).cumsum(1), threshold)
    return end[:, 0], ((chunk * CHUNK + entry) * (total > 0))[:, 0]


def verify_greedily(call, tokens, counts, sequence, first_row):
    """accepted [B] and next_token [B]."""
    K = tokens.shape[1]
    position = torch.arange(K + 1, device=tokens.device)
    best = order(call.target_probs).argmax(-1)[sequence, within(first_row + position, call.target_probs)]  # [B, K + 1]
    end = (counts & (tokens == best[:, :K])).cumprod(1).sum(1, keepdim=True)
    return end[:, 0], best.gather(1, end)[:, 0]


def emit(draft_tokens, accepted, next_token, pad, emitted):
    """See `api.emit`."""
    K = draft_tokens.shape[1]
    position = torch.arange(K + 1, device=emitted.device)
    end = accepted.clamp(0, K)[:, None]
    drafts = torch.nn.functional.pad(draft_tokens.long(), (0, 1))
    emitted.copy_(torch.where(position < end, drafts, torch.where(position == end, next_token[:, None].long(), pad)))


def within(index, x):
    """An index into x's second dimension; what does not count may lie past its end."""
    return index.clamp(max=max(x.shape[1] - 1, 0))


def entries_of(x, temperature, index, ids):
    """The integers of ids [B, K] in the rows that index stands for, logits where there is a temperature."""
    if temperature is not None:
        return probability(x[index], temperature[:, None], ids)
    if isinstance(index[1], slice):  # half the time of the general form
        return fixed(x[index].gather(2, ids[:, :, None])[:, :, 0])
    return fixed(x[index + (ids,)])


def row_of(x, temperature, sequence, index):
    """Row x[sequence[b], index[b]] for each b: [S, n, m] -> [B, m] integers, or scaled. Indices are [B, 1]."""
    if x.is_contiguous():  # half the time of the general form
        row = x.flatten(0, 1).index_select(0, (sequence * x.shape[1] + index)[:, 0])
    else:
        row = x[sequence[:, 0], index[:, 0]]
    return scaled_(row.float()) if temperature is None else probabilities(row, temperature)


def first_above(cumulative, threshold):
    """Where each row [B, n] of running sums passes the threshold: [B, 1]. The last place where none does."""
    return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=cumulative.shape[1] - 1)
