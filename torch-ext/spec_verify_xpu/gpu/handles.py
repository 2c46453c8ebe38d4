"""Launching a kernel without what Triton does anew at each call: binding arguments, specialising them, asking for the stream.

Ours are compiled for dtypes and constants alone, so a compiled kernel can be kept by those. How a kept one is run is
private to Triton: known for its NVIDIA backend from 3.6 on. Elsewhere, and while a profiler hooks launches, kernel[grid]
runs it.
"""

from typing import Any

import torch
import triton

LIMIT = 2**31  # integer arguments beyond it are 64 bits wide, which is another compiled kernel

compiled_kernels: dict[tuple, Any] = {}


def keeps_handles(device):
    """Whether the installed Triton runs kept kernels on this device as this module knows."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return device.type == "cuda" and torch.version.hip is None and version >= (3, 6)


def launch(kernel, grid, device, keep, pointers, integers, constants, options, overlap=()):
    """kernel[grid](*pointers, *integers, *constants, *overlap, **options), the grid of three, pointers tensors or None."""
    if not keep or triton.knobs.runtime.launch_enter_hook.calls:
        return kernel[grid](*pointers, *integers, *constants, *overlap, **options)
    widths = (-LIMIT <= min(integers) and max(integers) < LIMIT) or tuple(-LIMIT <= x < LIMIT for x in integers)
    # Not by the kernel and the device's `overlap` themselves, which Triton hashes anew, sources and all.
    key = id(kernel), device.index, widths, constants, options["num_warps"], *[x if x is None else x.dtype for x in pointers]
    compiled = compiled_kernels.get(key)
    if compiled is None:
        compiled_kernels[key] = kernel[grid](*pointers, *integers, *constants, *overlap, **options)
    else:
        addresses = [x if x is None else x.data_ptr() for x in pointers]
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        how = (stream, compiled.function, compiled.packed_metadata, None, None, None)  # no metadata for hooks, no hooks
        compiled.run(*grid, *how, *addresses, *integers, *constants, *overlap)
