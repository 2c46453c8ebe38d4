"""Exact verification of speculative drafts on Intel, NVIDIA and AMD GPUs and on the CPU. The rule is in rule.py."""

from .api import VerifyResult, check, verify

__all__ = ["VerifyResult", "check", "verify"]
__version__ = "1.0.0"
