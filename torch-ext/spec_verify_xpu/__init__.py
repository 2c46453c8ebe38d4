"""Exact verification of speculative drafts on Intel, NVIDIA and AMD GPUs and on the CPU. The rule is in rule.py."""

from .api import (
    VerifyResult,
    check,
    emit,
    sample,
    sample_logits,
    verify,
    verify_greedy,
    verify_logits,
    verify_logits_varlen,
    verify_varlen,
    warmup,
)
from .masks import mask_logits
from .metrics import Statistics, logprobs, statistics

__all__ = [
    "Statistics",
    "VerifyResult",
    "check",
    "emit",
    "logprobs",
    "mask_logits",
    "sample",
    "sample_logits",
    "statistics",
    "verify",
    "verify_greedy",
    "verify_logits",
    "verify_logits_varlen",
    "verify_varlen",
    "warmup",
]
__version__ = "1.0.0"
