"""Host side of the Triton kernels: outputs, scratch, strides, grids, and the device they run on."""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch
import triton

from .config import CONFIGURATIONS
from .handles import keeps_handles, launch
from .kernels import HEADER, locate, sum_chunks


def runs_on():
    """The type of the tensors that Triton's kernels run on here: "cpu" under its interpreter, None without a GPU."""
    if not isinstance(sum_chunks, triton.runtime.JITFunction):
        return "cpu"
    try:
        return triton.runtime.driver.active.get_active_torch_device().type
    except RuntimeError:  # Triton finds no GPU that it has a driver for
        return None


def require_triton(device_type):
    """Raise where Triton cannot run on tensors of this device type."""
    here = runs_on()
    if here is None:
        raise ValueError('impl: expected a GPU that Triton has a driver for, for "triton", got none')
    if here != device_type:
        raise ValueError(f'impl: "triton" runs on {here} tensors here, got {device_type} tensors')


def verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths):
    """Arguments as in `api.verify`, validated, uniforms given. Returns accepted [B] and next_token [B], int64."""
    (B, K), V = draft_tokens.shape, target_probs.shape[-1]
    device = target_probs.device
    on = device_facts(device)
    config = CONFIGURATIONS[device.type](B, V, on.threads)
    chunks = ceil_div(V, config.chunk)
    accepted = torch.empty(B, dtype=torch.int64, device=device)
    next_token = torch.empty(B, dtype=torch.int64, device=device)
    if B == 0:
        return accepted, next_token
    scratch = torch.empty(B * (HEADER.value + chunks), dtype=torch.int64, device=device)
    if K == 0:
        draft_probs = None  # it has no row that a load could touch
    sizes = (V if draft_probs is None else draft_probs.shape[-1], V, chunks)
    strides = ((0, 0) if draft_probs is None else draft_probs.stride()[:2]) + target_probs.stride()[:2]
    aligned = is_aligned(target_probs) and (draft_probs is None or is_aligned(draft_probs))
    inputs = (
        draft_tokens.contiguous(),
        draft_probs,
        target_probs,
        fields(uniform_accept).contiguous(),
        fields(uniform_sample).contiguous(),
        lengths if lengths is None else lengths.contiguous(),
    )
    with on_device(device):
        launch(
            sum_chunks, (B, ceil_div(chunks, config.chunks), 1), device, on.keep,
            pointers=(*inputs, scratch, accepted),
            integers=(K, *sizes, *strides),
            constants=(
                uniform_accept.dtype == torch.float64, uniform_sample.dtype == torch.float64,
                max(16, power_of_2(K)), aligned, config.chunk, config.segment(aligned), config.limbs,
                config.chunks,
            ),
            overlap=on.release,
            options={"num_warps": config.sum_warps, **on.sum_options},
        )  # fmt: skip
        launch(
            locate, (B, 1, 1), device, on.keep,
            pointers=(draft_probs, target_probs, scratch, next_token),
            integers=(*sizes, *strides),
            constants=(aligned, config.chunk, config.limbs, max(128, power_of_2(chunks))),
            overlap=on.wait,
            options={"num_warps": config.locate_warps, **on.locate_options},
        )  # fmt: skip
    return accepted, next_token


def ceil_div(n, d):
    return -(-n // d)  # triton.cdiv is for kernels, and slow on the host


def power_of_2(n):
    """The least that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def fields(uniforms):
    """float64 as int64, its fields: no kernel computes in fp64."""
    return uniforms.view(torch.int64) if uniforms.dtype == torch.float64 else uniforms


def is_aligned(probs):
    """Whether every row starts at a multiple of 16 bytes and holds a multiple of 16 entries."""
    stride_b, stride_k, _ = probs.stride()
    return (probs.data_ptr() | probs.shape[2] | stride_b | stride_k) % 16 == 0


@dataclass(frozen=True)
class DeviceFacts:
    """What is done on one device alone."""

    threads: int = 0  # warps that fill it
    keep: bool = False  # whether compiled kernels are kept and run by handles.py
    release: Optional[Callable] = None  # what sum_chunks and locate call where launches overlap
    wait: Optional[Callable] = None
    sum_options: dict = field(default_factory=dict)
    locate_options: dict = field(default_factory=dict)


@functools.lru_cache(None)
def device_facts(device):
    if device.type == "xpu":
        from .xpu import OPTIONS

        threads = 8 * torch.xpu.get_device_properties(device).gpu_eu_count  # 8 an execution unit, 7 on Iris Xe
        return DeviceFacts(threads=threads, sum_options=OPTIONS, locate_options=OPTIONS)
    if device.type == "cpu":
        return DeviceFacts()
    threads = 16 * torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0):
        from .overlap import release, wait  # programmatic dependent launch, from Hopper on

        return DeviceFacts(threads, keeps_handles(device), release, wait, locate_options={"launch_pdl": True})
    return DeviceFacts(threads, keeps_handles(device))


def on_device(device):
    """Launches go to the current device, so make the tensors' device current where it is not."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or module.current_device() == device.index:
        return contextlib.nullcontext()
    return module.device(device)
