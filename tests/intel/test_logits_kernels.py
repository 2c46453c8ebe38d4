"""The tests of the kernels that read logits, on Intel's SPIR-V."""

from test_logits import *  # noqa: F403
