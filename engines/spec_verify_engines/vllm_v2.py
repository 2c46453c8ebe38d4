"""The rejection sampler of vLLM's V2 model runner, by `spec_verify_xpu.verify_logits_varlen`. vllm.py puts it in place."""

import functools
from inspect import signature

import torch

import spec_verify_xpu as sv

# Options that change nothing here: vLLM's own noise, and the parameters of a rule that fly_window_size switches on.
IRRELEVANT = "use_fp64", "fly_entropy_threshold", "fly_entropy_top_k"
OF_ROWS = "target_logits", "draft_sampled", "pos", "expanded_idx_mapping", "expanded_local_pos"  # an entry for each row


def in_place_of(original):
    required = tuple(signature(verify).parameters)
    usual = {name: parameter.default for name, parameter in signature(original).parameters.items() if name not in required}

    def rejection_sample(*arguments, **options):
        """Any option that is set is another rule, and left to vLLM. So is a step without drafts."""
        arguments += tuple([options.pop(name) for name in required[len(arguments) :]])
        inputs, more = arguments[: len(required)], arguments[len(required) :]
        target_logits, _, _, _, _, idx_mapping, *_, K = inputs
        rows, R = target_logits.shape[0], idx_mapping.shape[0]
        if rows == R or any(is_set(name, x, usual) for name, x in (*zip(usual, more), *options.items())):
            return original(*arguments, **options)
        sampled, num_sampled = verify(*inputs)
        if rows < R * (K + 1):  # some requests have fewer drafts than others, and may have none
            fill_in_first_tokens(sampled, original, dict(zip(required, inputs)), more, options)
        return sampled, num_sampled

    return rejection_sample


def is_set(name, value, usual):
    """Whether an option is not what it is by default, and of consequence. One that vLLM does not know is for it to refuse."""
    default = usual.get(name)
    return value is not default and name not in IRRELEVANT and (isinstance(value, torch.Tensor) or value != default)


def fill_in_first_tokens(sampled, original, inputs, more, options):
    """Write the tokens of requests without drafts, as all are after their prompts, into the first column of sampled.

    vLLM draws them, as it does in a step in which nobody has drafts, so that a token does not depend on what others have.
    """
    cu_num_logits = inputs["cu_num_logits"]
    rows = {name: inputs[name].index_select(0, cu_num_logits[:-1]) for name in OF_ROWS}  # the first of each request
    cu_rows = torch.arange(len(cu_num_logits), dtype=cu_num_logits.dtype, device=cu_num_logits.device)
    tokens, _ = original(*{**inputs, **rows, "cu_num_logits": cu_rows}.values(), *more, **options)
    sampled[:, 0] = torch.where(cu_num_logits.diff() == 1, tokens[:, 0], sampled[:, 0])


def verify(
    target_logits,
    draft_logits,
    draft_sampled,
    cu_num_logits,
    pos,
    idx_mapping,
    expanded_idx_mapping,
    expanded_local_pos,
    temperature,
    seed,
    num_speculative_steps,
):
    """The tokens of a step, int64 [R, num_speculative_steps + 1], padded with -1; and how many they are, int32 [R].

    Each of R requests has one row more than drafts, N rows in all, and a state, whose index is one of S.

    Parameters
    ----------
    target_logits
        Processed, so divided by temperature too [N, V]: their softmax is the target's distribution.
    draft_logits
        What the drafts were drawn from, by index of state and number of the draft [S, num_speculative_steps, V_draft], not yet
        divided by temperature; or None. As in vLLM, tokens that one of the two vocabularies lacks do not exist.
    draft_sampled
        The token before each row [N]: a request's last token, then its drafts; -1 is a draft that does not count.
    cu_num_logits
        How many rows stand before each request's own, and N last [R + 1].
    pos
        The position of the token before each row in its text [N], int64.
    idx_mapping
        The index of each request's state [R].
    expanded_idx_mapping, expanded_local_pos
        The same for each row, and its number among its request's rows [N]. They are not read: the others say as much.
    temperature, seed
        [S], float32 and int64, by index of state. A request of temperature 0 is greedy.
    """
    (R,), device, K = idx_mapping.shape, target_logits.device, num_speculative_steps
    of_requests = cu_num_logits, pos, idx_mapping, temperature, seed
    draft_tokens, cu_drafts, seeds, offsets, temperatures, of_draft = preparation(device.type)(draft_sampled, *of_requests, K)
    if draft_logits is None:
        slots = of_draft = None
    else:
        slots, V, V_draft = idx_mapping, target_logits.shape[-1], draft_logits.shape[-1]
        if V != V_draft:
            target_logits, draft_logits = target_logits[:, :V_draft], draft_logits[:, :, :V]
    sampled = torch.empty(R, K + 1, dtype=torch.int64, device=device)
    num_sampled = torch.empty(R, dtype=torch.int32, device=device)
    sv.verify_logits_varlen(
        draft_tokens,
        draft_logits,
        target_logits,
        cu_drafts,
        K,
        temperature=temperatures,
        draft_temperature=of_draft,
        draft_slots=slots,
        seed=seeds,
        offset=offsets,
        num_emitted=num_sampled,
        emitted=sampled,
        impl="eager" if device.type == "cpu" else "triton",  # see vllm.py
    )
    return sampled, num_sampled


@functools.lru_cache(None)
def preparation(device_type):
    """by_torch, or what does the same in one launch on GPUs. On the CPU Triton need not be installed."""
    if device_type in ("cpu", "meta"):
        return by_torch
    from .vllm_v2_kernel import by_triton

    return by_triton


def by_torch(draft_sampled, cu_num_logits, pos, idx_mapping, temperature, seed, K):
    """From arguments of verify what verify_logits_varlen takes beside logits, of R requests with T drafts, at most K each.

    draft_tokens [T]; cu_drafts [R + 1]; seed [R]; offset [R], another one in each step; temperature [R], that of logits which
    were divided already: 1, or 0 for greedy requests; and draft_temperature [R].
    """
    (N,), (R,) = draft_sampled.shape, idx_mapping.shape
    cu_drafts = cu_num_logits - torch.arange(R + 1, dtype=cu_num_logits.dtype, device=cu_num_logits.device)
    draft = torch.arange(N - R, dtype=cu_drafts.dtype, device=cu_drafts.device)
    first_rows = 1 + torch.searchsorted(cu_drafts[1:-1], draft, right=True)  # how many requests' before each draft
    of_draft = temperature[idx_mapping]
    randomness = seed[idx_mapping].long(), pos[cu_num_logits[:-1]].long()
    return draft_sampled[draft + first_rows], cu_drafts, *randomness, (of_draft != 0).float(), of_draft.float()
