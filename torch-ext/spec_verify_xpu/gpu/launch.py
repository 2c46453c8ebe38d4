"""Host side of the Triton kernels: outputs, scratch, strides, grids, and the device they run on."""

import contextlib
import functools

import torch
import triton

from .config import CONFIGURATIONS
from .kernels import HEADER, locate, sum_chunks


def runs_on():
    """The type of the tensors that Triton's kernels run on here: "cpu" under its interpreter, "no" without a driver."""
    if not isinstance(sum_chunks, triton.runtime.JITFunction):
        return "cpu"
    try:
        return triton.runtime.driver.active.get_active_torch_device().type
    except RuntimeError:  # Triton finds no GPU that it has a driver for
        return "no"


def require_triton(device_type):
    """Raise where Triton cannot run on tensors of this device type."""
    if runs_on() != device_type:
        raise ValueError(f'impl: "triton" runs on {runs_on()} tensors here, got {device_type} tensors')


def verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths):
    """Arguments as in `api.verify`, validated, uniforms given. Returns accepted [B] and next_token [B], int64."""
    (B, K), V = draft_tokens.shape, target_probs.shape[-1]
    device = target_probs.device
    config = CONFIGURATIONS[device.type]
    chunks = triton.cdiv(V, config.chunk)
    accepted = torch.empty(B, dtype=torch.int64, device=device)
    next_token = torch.empty(B, dtype=torch.int64, device=device)
    if B == 0:
        return accepted, next_token
    scratch = torch.empty(B * (HEADER.value + chunks), dtype=torch.int64, device=device)
    if K == 0:
        draft_probs = None  # it has no row that a load could touch
    V_draft = V if draft_probs is None else draft_probs.shape[-1]
    draft_strides = (0, 0) if draft_probs is None else draft_probs.stride()[:2]
    target_strides = target_probs.stride()[:2]
    aligned = is_aligned(target_probs) and (draft_probs is None or is_aligned(draft_probs))
    float64 = [u.dtype == torch.float64 for u in (uniform_accept, uniform_sample)]
    uniform_accept, uniform_sample = (
        u.view(torch.int64) if is_double else u for u, is_double in zip((uniform_accept, uniform_sample), float64)
    )
    release, sum_options, wait, locate_options = backend_options(device)
    with on_device(device):
        sum_chunks[(B, triton.cdiv(chunks, config.chunks))](
            draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths, scratch, accepted,
            K, V_draft, V, chunks, *draft_tokens.stride(), *draft_strides, *target_strides,
            *uniform_accept.stride(), *uniform_sample.stride(), 0 if lengths is None else lengths.stride(0),
            *float64, max(16, triton.next_power_of_2(K)),
            aligned, config.chunk, config.segment(aligned), config.limbs, config.chunks, release,
            num_warps=config.sum_warps, **sum_options,
        )  # fmt: skip
        locate[(B,)](
            draft_probs, target_probs, scratch, next_token, V_draft, V, chunks, *draft_strides, *target_strides,
            aligned, config.chunk, config.limbs, max(128, triton.next_power_of_2(chunks)), wait,
            num_warps=config.locate_warps, **locate_options,
        )  # fmt: skip
    return accepted, next_token


def is_aligned(probs):
    """Whether every row starts at a multiple of 16 bytes and holds a multiple of 16 entries."""
    return probs.data_ptr() % 16 == 0 and all(x % 16 == 0 for x in (probs.shape[2], *probs.stride()[:2]))


@functools.lru_cache(None)
def backend_options(device):
    """What the two kernels take on this device alone: (release, options of sum_chunks, wait, options of locate)."""
    if device.type == "xpu":
        from .xpu import OPTIONS

        return None, OPTIONS, None, OPTIONS
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0):
        from .overlap import release, wait  # programmatic dependent launch, from Hopper on

        return release, {}, wait, {"launch_pdl": True}
    return None, {}, None, {}


def on_device(device):
    """Launches go to the current device, so make the tensors' device current where it is not."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or module.current_device() == device.index:
        return contextlib.nullcontext()
    return module.device(device)
