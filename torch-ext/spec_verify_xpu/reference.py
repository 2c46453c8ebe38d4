"""rule.py as an implementation: tensors in, its lists into the outputs."""

import torch

from . import rule


def verify(call):
    """See ops.Call."""
    greedy = True if call.all_greedy else call.greedy
    temperature = call.one_temperature if call.logits and call.temperature is None else call.temperature
    randomness = {"seed": call.seed, "offset": call.offset, "temperature": temperature}
    options = {**randomness, **{name: getattr(call, name) for name in ("bonus_tokens", "draft_slots", "draft_temperature")}}
    uniforms = call.uniform_accept, call.uniform_sample
    rows = call.draft_tokens, call.draft_probs, call.target_probs
    if call.purpose == rule.DRAW:
        uniform = None if call.uniform_sample is None else call.uniform_sample[:, 0]
        tokens = rule.sample(call.target_probs[:, 0], uniform, **randomness)
        accepted = [0] * len(tokens)
    elif call.cu_drafts is None:
        accepted, tokens = rule.verify(*rows, *uniforms, call.lengths, greedy, **options)
    else:
        accepted, tokens = rule.verify_varlen(*rows, call.cu_drafts, call.max_drafts, *uniforms, greedy, **options)
    write(call.accepted, accepted)
    write(call.next_token, tokens)
    if call.num_emitted is not None:
        write(call.num_emitted, [n + 1 for n in accepted])
    if call.emitted is not None:
        drafts = call.draft_tokens.tolist()
        if call.cu_drafts is not None:
            starts = (start for start, _ in rule.spans(call.cu_drafts, len(drafts), call.max_drafts))
            drafts = [drafts[start : start + n] for start, n in zip(starts, accepted)]
        rows = [rule.emit_sequence(row, n, token) for row, n, token in zip(drafts, accepted, tokens)]
        write(call.emitted, [row + [-1] * (call.max_drafts + 1 - len(row)) for row in rows])


def emit(draft_tokens, accepted, next_token, pad, emitted):
    """See `api.emit`."""
    write(emitted, rule.emit(draft_tokens, accepted, next_token, pad))


def write(tensor, values):
    tensor.copy_(torch.tensor(values, dtype=torch.int64).view(tensor.shape))
