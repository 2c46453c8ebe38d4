"""Triton kernels on CPU tensors by what Intel ships: its Triton backend makes SPIR-V, its OpenCL runtime runs that on the CPU.

    runtime.install()
    kernel[grid](cpu_tensor, ..., num_warps=8)

Tensors are used in place. A GPU's compiler gets the same LLVM IR, without the three lines of `portable`.
"""

import ctypes
import dataclasses
import functools
import os
import re
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pyopencl as cl
import torch
import triton
from triton.backends import backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase

# What torch.xpu.get_device_capability() says of an Iris Xe (Gen12LP), as far as the backend asks.
IRIS_XE = {
    "name": "Intel(R) Iris(R) Xe Graphics",
    "max_work_group_size": 512,
    "sub_group_sizes": [8, 16, 32],
    "has_fp64": False,
    "has_subgroup_matrix_multiply_accumulate": False,
    "has_subgroup_2d_block_io": False,
    "has_bfloat16_conversions": False,
}
SUB_GROUP = int(os.environ.get("SPEC_VERIFY_SUB_GROUP", "16"))  # threads of a warp: 16, which is what an XPU gets, or 32
# A pass of the CPU runtime's compiler corrupts memory while it compiles some kernels, now and then: see docs/INTEL.md.
WITHOUT_FAULTY_PASS = "-opt-disable=sycl-kernel-reduce-cross-barrier-values -opt-bisect-verbose=0"
one_at_a_time = threading.Lock()  # a kernel in OpenCL holds the arguments of one launch, whichever thread has set them
SCALARS = {"i32": np.int32, "i64": np.int64}
IntelBackend = backends["intel"].compiler


def unchanged(llir):
    return llir


def install(sub_group=SUB_GROUP, mutate=unchanged):
    """Let Triton run on CPU tensors. `mutate` changes the LLVM IR of what is compiled from here on."""
    Backend.mutate = staticmethod(mutate)
    backends["intel"] = dataclasses.replace(backends["intel"], compiler=Backend)
    triton.runtime.driver.set_active(Driver(sub_group))


def portable(llir):
    """LLVM IR without what Intel's GPU drivers alone understand: a maximal work-group size, and vectors of one element."""
    llir = re.sub(r" !max_work_group_size !\d+", "", llir)
    llir = re.sub(r"shufflevector (<\d+ x [^>]+> [^,]+), [^,]+, <1 x i32> zeroinitializer", r"extractelement \1, i64 0", llir)
    llir = re.sub(r"(?:insert|extract)element <1 x ([^>]+)> (?:poison, \1 )?([^,]+), i64 0", r"bitcast \1 \2 to \1", llir)
    return re.sub(r"<1 x ([^>]+)>", r"\1", llir)


class Backend(IntelBackend):
    """Intel's backend. It has no SYCL to ask which GPU this is, and its last stage makes SPIR-V that the CPU runtime takes."""

    mutate = staticmethod(unchanged)

    def __init__(self, target):
        BaseBackend.__init__(self, target)
        self.device_arch = ""
        self.properties = self.parse_target(target.arch)
        self.binary_ext = "spv"

    def parse_options(self, options):
        return super().parse_options({"threads_per_warp": self.target.warp_size, **options})

    def make_spv(self, llir, metadata, options):
        return IntelBackend.make_spv(portable(self.mutate(llir)), metadata, options)

    def hash(self):
        return f"cpu {self.mutate.__name__} {super().hash()}"


@functools.lru_cache(None)
def context():
    """The CPU as an OpenCL device. The wheel's own .icd file points nowhere, so the loader is given the library itself."""
    os.environ["OCL_ICD_VENDORS"] = str(Path(sys.prefix) / "lib/libintelocl.so")
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # debug information is one more thing that the CPU runtime does not take
    os.environ["CL_CONFIG_LLVM_OPTIONS"] = WITHOUT_FAULTY_PASS
    return cl.Context(cl.get_platforms()[0].get_devices())


@functools.lru_cache(None)
def queue():
    return cl.CommandQueue(context())


class Driver(DriverBase):
    def __init__(self, sub_group):
        self.sub_group = sub_group
        self.utils = self
        self.launcher_cls = Launcher

    @classmethod
    def is_active(cls):
        return True

    def get_current_device(self):
        return self.sub_group, Backend.mutate  # Triton keeps compiled kernels by device

    def get_current_stream(self, device):
        return queue()

    def get_current_target(self):
        return GPUTarget("xpu", IRIS_XE, self.sub_group)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError

    def get_device_properties(self, device):
        return {"max_shared_mem": 65536}

    def load_binary(self, name, spirv, shared, build_flags, device):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # which tells of success
            program = cl.Program(context(), spirv).build()
        return program, cl.Kernel(program, name), 0, 0


class Launcher:
    """Calls a compiled kernel with the arguments of kernel[grid](...)."""

    def __init__(self, source, metadata):
        self.types = list(source.signature.values())
        self.shared = metadata.shared
        self.work_items = metadata.num_warps * metadata.threads_per_warp
        assert self.work_items <= IRIS_XE["max_work_group_size"]

    def __call__(self, x, y, z, queue, kernel, metadata, launch_metadata, enter_hook, exit_hook, *arguments):
        values = [as_argument(kind, value) for kind, value in zip(self.types, arguments) if kind != "constexpr"]
        with one_at_a_time:
            kernel.set_args(*values, *([cl.LocalMemory(self.shared)] if self.shared else []))
            event = cl.enqueue_nd_range_kernel(queue, kernel, (x * self.work_items, y, z), (self.work_items, 1, 1))
        event.wait()


def as_argument(kind, value):
    if kind in SCALARS:
        return SCALARS[kind](value)
    return cl.SVM((ctypes.c_char * 1).from_address(value.data_ptr()))
