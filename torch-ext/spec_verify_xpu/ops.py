"""The operator: its schema, its fake, and one registration for each device. Implementations are imported when first run."""

import functools
import importlib.util

import torch

from ._ops import add_op_namespace_prefix, ops

IMPLEMENTATIONS = ("auto", "triton", "numba", "eager", "reference")

_library = torch.library.Library(ops.name, "FRAGMENT")
_library.define(
    "verify(Tensor draft_tokens, Tensor? draft_probs, Tensor target_probs, Tensor uniform_accept,"
    " Tensor uniform_sample, Tensor? lengths, str impl) -> (Tensor, Tensor)"
)


def run_verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths, impl):
    run = implementation(target_probs.device.type, impl)
    return run(draft_tokens, rows(draft_probs), rows(target_probs), uniform_accept, uniform_sample, lengths)


def rows(probs):
    """With contiguous rows, as validated; a tensor that torch materialised on the way here may have lost them."""
    return probs if probs is None or probs.stride(-1) == 1 or probs.shape[-1] == 1 else probs.contiguous()


for key in ("CPU", "CUDA", "XPU"):  # torch's ROCm builds dispatch under CUDA
    _library.impl("verify", run_verify, key)


@torch.library.register_fake(add_op_namespace_prefix("verify"))
def fake_verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths, impl):
    B = draft_tokens.shape[0]
    return tuple(target_probs.new_empty(B, dtype=torch.int64) for _ in range(2))


def require_implementation(impl):
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


@functools.lru_cache(None)
def implementation(device_type, impl):
    """The function that verifies on this type of device. An implementation asked for by name is that one or an error."""
    require_implementation(impl)
    if impl == "auto":
        impl = "numba" if device_type == "cpu" else "triton"
        try:
            return implementation(device_type, impl)
        except ValueError:  # not installed, or not for this device
            return implementation(device_type, "eager")
    if impl == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ValueError('impl: expected Triton to be installed for "triton", got none')
        from .gpu.launch import require_triton, verify

        require_triton(device_type)
        return verify
    if impl == "numba":
        if device_type != "cpu":
            raise ValueError(f'impl: "numba" runs on cpu tensors, got {device_type} tensors')
        try:
            from .compiled_cpu import verify
        except ImportError as error:  # Numba says so of a NumPy that is too new for it, too
            raise ValueError(f'impl: expected Numba to be installed for "numba", got: {error}') from error

        return verify
    if impl == "eager":
        from .eager import verify

        return verify
    return verify_by_reference


def verify_by_reference(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths):
    from . import rule

    results = rule.verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths)
    return tuple(torch.tensor(x, dtype=torch.int64, device=target_probs.device) for x in results)
