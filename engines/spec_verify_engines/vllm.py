"""A plugin for vLLM: the rejection sampler of its V1 engine, by `spec_verify_xpu`. See docs/ENGINES.md."""

import logging
from inspect import signature
from itertools import accumulate, repeat

import torch

import spec_verify_xpu as sv

from . import vllm_v2

logger = logging.getLogger("vllm.spec_verify_xpu")  # vLLM shows what comes below its own name


def register():
    """What vLLM calls in each of its processes, as an entry point of `vllm.general_plugins`. Calling it again does nothing."""
    import vllm.v1.sample.rejection_sampler as sampler
    from vllm.platforms import current_platform

    if replace(sampler, verify, in_place_of) and current_platform.is_cpu():
        repair_at_first_step(sampler)
    try:
        import vllm.v1.worker.gpu.spec_decode.rejection_sampler as sampler_v2
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    except ImportError:  # a vLLM without V2
        return
    if "logits_cache" in signature(gumbel_sample).parameters:
        replace(sampler_v2, vllm_v2.verify, vllm_v2.in_place_of)
    else:  # the arguments have the same names where it keeps them divided by temperature
        logger.warning("%s: expected draft logits before temperature. It is left as it is.", sampler_v2.__name__)


def replace(sampler, verify, in_place_of):
    """Put ours in the place of a module's rejection_sample, where that takes what is expected. Whether it was put there now."""
    original = getattr(sampler, "rejection_sample", None)
    if getattr(original, "__module__", None) == in_place_of.__module__:
        return False
    expected = tuple(signature(verify).parameters)
    found = tuple(signature(original).parameters) if original else None
    if not found or found[: len(expected)] != expected:  # older versions pass probabilities
        logger.warning("%s: expected the arguments %s, got %s. It is left as it is.", sampler.__name__, expected, found)
        return False
    sampler.rejection_sample = in_place_of(original)
    logger.info("Drafts are verified by spec_verify_xpu in %s. VLLM_PLUGINS switches it off.", sampler.__name__)
    return True


def in_place_of(original):
    def rejection_sample(*arguments, **options):
        """Rules other than the lossless one are left to vLLM, and so are batches that have no chance in them."""
        *_, sampling_metadata = arguments
        is_other_rule = options.get("synthetic_mode") or options.get("fly_window_size") is not None
        if is_other_rule or sampling_metadata.all_greedy:
            return original(*arguments, **options)
        return verify(*arguments)

    return rejection_sample


def verify(
    draft_token_ids,
    num_draft_tokens,
    max_spec_len,
    cu_num_draft_tokens,
    draft_probs,
    target_logits,
    bonus_token_ids,
    sampling_metadata,
):
    """The tokens of a step of B requests with T drafts in all: int32 [B, max_spec_len + 1], padded with -1.

    Parameters
    ----------
    draft_token_ids
        [T], request after request; -1 is a draft that does not count.
    num_draft_tokens
        How many of them are whose: B ints.
    cu_num_draft_tokens
        Their running sums [B], on the device.
    draft_probs
        What the drafts were drawn from [T, V], or None.
    target_logits
        Processed [T, V]: their softmax is the target's distribution. The row of a greedy request is compared as it is.
    bonus_token_ids
        The token of each request whose drafts all stand [B, 1], which vLLM has drawn.
    sampling_metadata
        vLLM's: temperature [B], 0 for greedy requests, and a generator for each request that has a seed.
    """
    T, B, device = len(target_logits), len(num_draft_tokens), target_logits.device
    if T == 0:
        return bonus_token_ids.int()

    greedy = None if sampling_metadata.all_random else sampling_metadata.temperature == 0  # [B]
    accept, sample = (torch.empty(n, dtype=torch.int64, device=device).random_() for n in (T, T + B))  # 63 bits each
    starts = [0, *accumulate(num_draft_tokens)]
    for b, generator in sampling_metadata.generators.items():  # as many draws as drafts: none leaves the generator as it is
        drafts = slice(starts[b], starts[b + 1])
        accept[drafts].random_(generator=generator)
        sample[b:][drafts].random_(generator=generator)

    cu_drafts = torch.nn.functional.pad(cu_num_draft_tokens, (1, 0))
    emitted = torch.empty(B, max_spec_len + 1, dtype=torch.int32, device=device)
    options = {"bonus_tokens": bonus_token_ids[:, 0], "emitted": emitted}
    function = by_probabilities if device.type == "cpu" else by_logits
    function(greedy, draft_token_ids, draft_probs, target_logits, cu_drafts, max_spec_len, accept, sample, **options)
    return emitted


def by_logits(greedy, draft_token_ids, draft_probs, target_logits, *more, **options):
    """On a GPU: nothing waits for it, and the target's rows are read where they are."""
    draft_logits = None if draft_probs is None else draft_probs.log()
    sv.verify_logits_varlen(draft_token_ids, draft_logits, target_logits, *more, greedy=greedy, impl="triton", **options)


def by_probabilities(greedy, draft_token_ids, draft_probs, target_logits, cu_drafts, *more, **options):
    """On the CPU, where a softmax by torch takes less time than one in integers. A greedy request's is sure of the largest."""
    rows, starts = torch.empty_like(target_logits, dtype=torch.float32), cu_drafts.tolist()
    for is_sure, start, end in zip(repeat(False) if greedy is None else greedy.tolist(), starts, starts[1:]):
        logits, own = target_logits[start:end], rows[start:end]
        if is_sure:
            own.zero_().scatter_(1, logits.argmax(-1, keepdim=True), 1)
        else:
            torch.softmax(logits, -1, dtype=torch.float32, out=own)
    # Not by Numba: vLLM fails to start once it is imported.
    sv.verify_varlen(draft_token_ids, draft_probs, rows, cu_drafts, *more, impl="eager", **options)


def repair_at_first_step(sampler):
    """Work around what is wrong with sampling in vLLM's CPU engine (0.32), where a probe finds it wrong, before the first step.

    Not earlier, since vLLM puts its CPU kernels in place after it has loaded plugins.
    """
    constrain = sampler.apply_sampling_constraints

    def constrain_where_there_are_drafts(logits, *rest):
        return constrain(logits, *rest) if len(logits) else logits

    def first_step(*arguments):
        sampler.apply_sampling_constraints = constrain
        # Float and int32 values are written into an int64 copy, so that temperatures and top-p are uninitialised memory.
        ends = torch.tensor([1, 3], dtype=torch.int32)
        if sampler.expand_batch_to_tokens(torch.tensor([0.25, 0.75]), ends, 3).tolist() != [0.25, 0.75, 0.75]:
            sampler.expand_batch_to_tokens = expand_batch_to_tokens
        try:  # top-k without top-p takes the largest of no values in a step without drafts, as the first one is
            sampler.apply_top_k_top_p(torch.empty(0, 2), torch.empty(0, dtype=torch.int32), None)
        except (RuntimeError, IndexError):
            sampler.apply_sampling_constraints = constrain_where_there_are_drafts
        return sampler.apply_sampling_constraints(*arguments)

    sampler.apply_sampling_constraints = first_step


def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """x [B] repeated for each request's drafts, [num_tokens], with one of its values replaced."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
