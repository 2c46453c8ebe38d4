"""Host side of the Triton kernels: outputs, scratch, strides, grids, and the device they run on."""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch
import triton

from .config import CONFIGURATIONS
from .handles import keeps_handles, launch
from .kernels import HEADER, locate, sum_chunks, write_tokens


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


def verify(call):
    """See ops.Call."""
    (B,), K, V = call.accepted.shape, call.max_drafts, call.target_probs.shape[-1]
    if B == 0:
        return
    draft_probs, target_probs, device = call.draft_probs, fields(call.target_probs), call.accepted.device
    tokens, lengths, cu_drafts, greedy = map(contiguous, (call.draft_tokens, call.lengths, call.cu_drafts, call.greedy))
    greedy = greedy if greedy is None else greedy.view(torch.uint8)
    if tokens.numel() == 0:
        draft_probs = None  # it has no row that a load could touch
    on = device_facts(device)
    config = CONFIGURATIONS[device.type](B * (K + 1) if call.all_greedy else B, V, on.threads)
    chunks = ceil_div(V, config.chunk)
    programs = ceil_div(chunks, config.chunks)
    has_greedy = call.all_greedy or greedy is not None
    scratch = torch.empty(B * (HEADER.value + chunks), dtype=torch.int64, device=device)
    bests = torch.empty((B + tokens.numel()) * 2 * programs, dtype=torch.int64, device=device) if has_greedy else scratch
    sizes = (K, tokens.numel(), V if draft_probs is None else draft_probs.shape[-1], V, chunks)
    strides = (*row_strides(draft_probs), *row_strides(target_probs))
    aligned = is_aligned(target_probs) and (draft_probs is None or is_aligned(draft_probs))
    uniforms = call.uniform_accept, call.uniform_sample
    with on_device(device):
        launch(
            sum_chunks, (B, programs, K + 1 if call.all_greedy else 1), device, on.keep,
            pointers=(
                tokens, draft_probs, target_probs, *(contiguous(fields(x)) for x in uniforms), contiguous(call.seed),
                contiguous(call.offset), lengths, cu_drafts, greedy, scratch, bests,
            ),
            integers=(*sizes, *strides),
            constants=(
                *(x is not None and x.dtype == torch.float64 for x in uniforms), call.purpose,
                max(16, power_of_2(K)), aligned, config.chunk, config.segment(aligned), config.limbs, config.chunks,
            ),
            options={"num_warps": config.sum_warps, **on.sum_options},
            overlap=(on.release,),
        )  # fmt: skip
        launch(
            locate, (B, 1, 1), device, on.keep,
            pointers=(
                tokens, draft_probs, target_probs, lengths, cu_drafts, greedy, scratch, bests, call.accepted, call.next_token,
                call.emitted,
            ),
            integers=(*sizes, programs, *strides, 0 if call.emitted is None else call.emitted.stride(0)),
            constants=(
                call.all_greedy, max(16, power_of_2(K + 1)), aligned, config.chunk, config.limbs, max(128, power_of_2(chunks)),
            ),
            options={"num_warps": config.locate_warps, **on.locate_options},
            overlap=(on.wait,),
        )  # fmt: skip


def emit(draft_tokens, accepted, next_token, pad, emitted):
    """See `api.emit`."""
    (B, K), device = draft_tokens.shape, emitted.device
    if B == 0:
        return
    with on_device(device):
        launch(
            write_tokens, (B, 1, 1), device, device_facts(device).keep,
            pointers=(*map(contiguous, (draft_tokens, accepted, next_token)), emitted),
            integers=(pad, K, emitted.stride(0)),
            constants=(max(16, power_of_2(K + 1)),),
            options={"num_warps": 1},
        )  # fmt: skip


def ceil_div(n, d):
    return -(-n // d)  # triton.cdiv is for kernels, and slow on the host


def power_of_2(n):
    """The least that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def fields(x):
    """float64 as int64, its fields: no kernel computes in fp64."""
    return x.view(torch.int64) if x is not None and x.dtype == torch.float64 else x


def contiguous(x):
    return x if x is None else x.contiguous()


def row_strides(probs):
    """(stride of a sequence, stride of a row). Ragged rows belong to no sequence."""
    return (0, 0) if probs is None else (0, *probs.stride()[:-1])[-2:]


def is_aligned(probs):
    """Whether every row starts at a multiple of 16 bytes and holds a multiple of 16 entries."""
    stride_b, stride_k = row_strides(probs)
    return (probs.data_ptr() | probs.shape[-1] | stride_b | stride_k) % 16 == 0


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
