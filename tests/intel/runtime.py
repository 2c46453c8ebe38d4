"""Run the Triton kernels on CPU tensors through what Intel ships: its XPU backend and its OpenCL CPU runtime. No GPU needed.

`install(sub_group=16)` makes `kernel[grid](cpu_tensor, ..., num_warps=8)` compile to SPIR-V with Intel's backend
(`triton-xpu`) and run that on the CPU. Tensors are used in place.
"""

import ctypes
import dataclasses
import os
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

os.environ.setdefault("PYOPENCL_NO_CACHE", "1")  # the cache of built programs does not know a mutated one
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # debug information is an extension that the CPU runtime refuses

LIBRARY = Path(sys.prefix) / "lib" / "libintelocl.so"
# The wheel's own .icd file holds a build-time path, so pyopencl's loader is given one that points here.
ICD = Path(sys.prefix) / "etc" / "OpenCL" / "cpu" / "intel.icd"
ICD.parent.mkdir(parents=True, exist_ok=True)
ICD.write_text(f"{LIBRARY}\n")
os.environ.setdefault("OCL_ICD_VENDORS", str(ICD.parent))

import pyopencl as cl  # noqa: E402  (reads the environment)
import triton  # noqa: E402
from triton.backends import backends  # noqa: E402
from triton.backends.compiler import BaseBackend, GPUTarget  # noqa: E402
from triton.backends.driver import DriverBase  # noqa: E402
from triton.testing import do_bench  # noqa: E402

warnings.filterwarnings("ignore", category=cl.CompilerWarning)

XPU = backends["intel"].compiler

# What torch.xpu.get_device_capability() reports of an Iris Xe (Gen12LP), as far as the backend asks.
IRIS_XE = {
    "name": "Intel(R) Iris(R) Xe Graphics",
    "max_work_group_size": 512,
    "sub_group_sizes": [8, 16, 32],
    "has_fp64": False,
    "has_subgroup_matrix_multiply_accumulate": False,
    "has_subgroup_2d_block_io": False,
    "has_bfloat16_conversions": False,
}

SCALARS = {"i1": np.int8, "i32": np.int32, "i64": np.int64, "u64": np.uint64, "fp32": np.float32}


def unchanged(llir):
    return llir


def portable(llir):
    """LLVM IR without the two extensions that only Intel's GPU drivers take: max_work_group_size and vectors of one."""
    llir = re.sub(r" !max_work_group_size !\d+", "", llir)
    element = r"<1 x ([^>]+)>"
    llir = re.sub(rf"insertelement {element} (?:poison|undef), \1 ([^,]+), i(?:32|64) 0", r"bitcast \1 \2 to \1", llir)
    llir = re.sub(rf"extractelement {element} ([^,]+), i(?:32|64) 0", r"bitcast \1 \2 to \1", llir)
    llir = re.sub(rf"{element} splat \(\1 ([^)]+)\)", r"\1 \2", llir)
    llir = re.sub(rf"{element} <\1 ([^>]+)>", r"\1 \2", llir)
    return re.sub(element, r"\1", llir)


class Backend(XPU):
    """Intel's backend, with no SYCL to ask for the architecture. Its last stage makes the SPIR-V that the CPU runtime takes."""

    mutate = staticmethod(unchanged)

    def __init__(self, target):
        BaseBackend.__init__(self, target)
        self.device_arch = ""
        self.properties = self.parse_target(target.arch)
        self.binary_ext = "spv"

    def parse_options(self, options):
        return super().parse_options({"threads_per_warp": self.target.warp_size, **options})

    def make_spv(self, llir, metadata, options):
        return XPU.make_spv(portable(self.mutate(llir)), metadata, options)

    def hash(self):
        return f"cpu-{self.mutate.__name__}-{super().hash()}"


class Launcher:
    """Calls a kernel with the arguments of `kernel[grid](...)`; those that were compiled in are constexpr in its signature."""

    def __init__(self, source, metadata):
        self.types = list(source.signature.values())
        self.metadata = metadata
        self.work_items = metadata.num_warps * metadata.threads_per_warp
        if self.work_items > IRIS_XE["max_work_group_size"]:
            raise ValueError(f"{metadata.name}: {self.work_items} work-items in a group, at most 512")

    def __call__(self, x, y, z, queue, kernel, packed_metadata, launch_metadata, enter_hook, exit_hook, *arguments):
        values = [argument(kind, value) for kind, value in zip(self.types, arguments) if kind != "constexpr"]
        if self.metadata.shared:
            values.append(cl.LocalMemory(self.metadata.shared))
        kernel.set_args(*values)
        cl.enqueue_nd_range_kernel(queue, kernel, (x * self.work_items, y, z), (self.work_items, 1, 1)).wait()


def argument(kind, value):
    """A tensor by its address (fine-grain system memory needs no copy), a number in the width that the kernel declares."""
    if kind[0] == "*":
        return cl.SVM((ctypes.c_char * 1).from_address(value.data_ptr()))
    return SCALARS[kind](value)


class Utils:
    def __init__(self, context):
        self.context = context

    def get_device_properties(self, device):
        return {"max_shared_mem": 65536}

    def load_binary(self, name, binary, shared, build_flags, device):
        program = cl.Program(self.context, binary).build()
        return program, cl.Kernel(program, name), 0, 0


class Driver(DriverBase):
    launcher_cls = Launcher

    def __init__(self, sub_group):
        super().__init__()
        self.sub_group = sub_group
        self.device = next(device for platform in cl.get_platforms() for device in platform.get_devices())
        context = cl.Context([self.device])
        self.queue = cl.CommandQueue(context)
        self.utils = Utils(context)

    @classmethod
    def is_active(cls):
        return True

    def get_current_device(self):
        return self.sub_group, Backend.mutate  # Triton keeps what it compiled by device

    def get_current_stream(self, device):
        return self.queue

    def get_current_target(self):
        return GPUTarget("xpu", IRIS_XE, self.sub_group)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return do_bench


def install(sub_group, mutate=unchanged):
    """Make this Triton's driver, with sub-groups of 16 or 32. `mutate` maps the LLVM IR of what is compiled from now on."""
    Backend.mutate = staticmethod(mutate)
    backends["intel"] = dataclasses.replace(backends["intel"], compiler=Backend)
    triton.runtime.driver.set_active(Driver(sub_group))
