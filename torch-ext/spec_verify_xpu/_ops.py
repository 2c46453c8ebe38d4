"""The namespace of the operators. A hub build writes its own, unique to the build, so that two builds can be loaded at once."""

import torch

ops = torch.ops.spec_verify_xpu


def add_op_namespace_prefix(name):
    return f"spec_verify_xpu::{name}"
