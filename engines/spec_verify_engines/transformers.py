"""Assisted generation of Hugging Face transformers, verified by `spec_verify_xpu.verify`. See docs/ENGINES.md.

Two functions of transformers are replaced while this is switched on, in the whole process: the rule itself, and the candidates
of prompt lookup, which then come to the rule instead of to a comparison of their own.
"""

from contextlib import contextmanager
from typing import Any

import torch

import spec_verify_xpu as sv

replaced: dict[tuple[Any, str], Any] = {}  # what was there


def patch():
    """Verify by `spec_verify_xpu.verify` wherever transformers samples speculatively, until `unpatch`.

    That is `generate(do_sample=True)` with an assistant, an early exit or prompt lookup. Its uniforms come from torch's
    default generator, which transformers' `set_seed` seeds. Greedy generation and the lossy `assistant_ensemble_weight` are
    left as they are. Once is enough, and again does nothing.
    """
    if replaced:
        return
    from transformers.generation import utils
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    for where, name, replacement in (
        (utils, "_speculative_sampling", exact_speculative_sampling),
        (PromptLookupCandidateGenerator, "get_candidates", candidates_without_probabilities),
    ):
        replaced[where, name] = getattr(where, name)
        setattr(where, name, replacement(replaced[where, name]))


def unpatch():
    """Put back what `patch` replaced."""
    while replaced:
        (where, name), original = replaced.popitem()
        setattr(where, name, original)


@contextmanager
def patched():
    """`patch` inside a with statement. What was switched on before it stays on."""
    was_patched = bool(replaced)
    patch()
    try:
        yield
    finally:
        if not was_patched:
            unpatch()


def exact_speculative_sampling(original):
    def speculative_sampling(
        candidate_input_ids, candidate_logits, candidate_length, new_logits, assistant_ensemble_weight=None
    ):
        """Ids [1, prompt + K], the draft's logits [1, K, V_draft] and the target's [1, K + 1, V], both processed.

        Returns the tokens of the step [1, accepted + 1], and accepted.
        """
        if assistant_ensemble_weight is not None:
            return original(candidate_input_ids, candidate_logits, candidate_length, new_logits, assistant_ensemble_weight)
        drafts = candidate_input_ids[:, -candidate_length:]
        has_probs = candidate_logits.shape[-1] > 0
        draft_probs = candidate_logits.softmax(-1, dtype=torch.float32) if has_probs else None
        accepted, next_token = sv.verify(drafts, draft_probs, new_logits.softmax(-1, dtype=torch.float32))
        return torch.cat((drafts[:, : accepted.item()], next_token[:, None]), 1), accepted[0]

    return speculative_sampling


def candidates_without_probabilities(original):
    def get_candidates(self, input_ids, **kwargs):
        """Prompt lookup has no logits, and says None; drafts with logits over a vocabulary of none are left to the rule."""
        candidate_input_ids, _ = original(self, input_ids, **kwargs)
        K = candidate_input_ids.shape[1] - input_ids.shape[1]
        return candidate_input_ids, input_ids.new_empty((1, K, 0)) if K else None

    return get_candidates
