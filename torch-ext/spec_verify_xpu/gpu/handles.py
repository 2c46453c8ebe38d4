"""Launching kernels by the CUDA driver: what kernel[grid] does anew at each call, most of a launch, is done once.

Ours are compiled for dtypes and constants alone. So launches can be kept by those, and need addresses, integers and grids.
How a compiled kernel is called is Triton's own affair; its assembly tells whether it is called as this module knows. Where it
is not, or is not NVIDIA's, and while a profiler hooks launches, kernel[grid] runs it.
"""

import ctypes
import functools
import re
import struct
import threading
from typing import Any, NamedTuple

import torch
import triton

INT32 = range(-(2**31), 2**31)
OVERLAPPED = 6  # the driver's CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not used the device yet

kept_launches: dict = {}


class Launch(NamedTuple):
    """kernel[grid](*pointers, *integers, *constants, *overlap, **options), the grid of three."""

    kernel: Any
    pointers: tuple  # names of tensors
    grid: tuple
    integers: tuple
    constants: tuple
    options: dict
    overlap: tuple = ()

    def run(self, tensors):
        """Launch it as Triton does. Returns the compiled kernel."""
        pointers = [tensors[name] for name in self.pointers]
        return self.kernel[self.grid](*pointers, *self.integers, *self.constants, *self.overlap, **self.options)

    def key(self):
        """Without the kernel and `overlap` themselves, which Triton hashes anew, sources and all."""
        widths = tuple([x in INT32 for x in self.integers])
        return id(self.kernel), widths, self.constants, self.options["num_warps"]


def launch(launches, tensors, device, keeps):
    """Launch one after the other, with tensors {name: tensor or None} on the current device."""
    key = key_of(launches, tensors, device) if keeps and not is_hooked() else None
    kept = kept_launches.get(key)
    if kept:
        kept.run(numbers_of(launches), [x.data_ptr() for x in tensors.values() if x is not None])
        return
    compiled = [(x, x.run(tensors)) for x in launches]
    if key and key not in kept_launches:
        names = [name for name, x in tensors.items() if x is not None]
        known = [is_called_as_known(kernel, x, names) for x, kernel in compiled]
        kept_launches[key] = KeptLaunches(compiled, names, device) if all(known) else None


def key_of(launches, tensors, device):
    """What launches are kept by: few for one set of dtypes, since neither grids nor integers' values are in it."""
    dtypes = tuple([x if x is None else x.dtype for x in tensors.values()])
    return device.index, dtypes, *(x.key() for x in launches)


def numbers_of(launches):
    """(grids, integers) of launches, as KeptLaunches takes them. Given again, the same object is not written again."""
    return [x.grid for x in launches], [number for x in launches for number in x.integers]


class KeptLaunches:
    """Compiled kernels, called with the addresses of the named tensors, a grid for each kernel, and the integers of all."""

    def __init__(self, compiled, names, device):
        counts = [len(x.integers) for x, _ in compiled]
        # Their parameters, 8 bytes each: the addresses, and behind each kernel's integers two zeros: see is_called_as_known.
        self.values = (ctypes.c_uint64 * (len(names) + sum(counts) + 2 * len(counts)))()
        numbers = struct.Struct("".join(f"{count}q16x" for count in counts))
        self.write_addresses = functools.partial(struct.Struct(f"{len(names)}Q").pack_into, self.values, 0)
        self.write_integers = functools.partial(numbers.pack_into, self.values, 8 * len(names))
        self.written = self.stream = None  # the grids and integers, and the stream, that were written last
        self.device_index = device.index
        self.lock = threading.Lock()  # of the values, and of each launch's settings
        at = ctypes.addressof(self.values)
        addresses = {name: at + 8 * i for i, name in enumerate(names)}
        self.launches, at = [], at + 8 * len(names)
        for x, kernel in compiled:
            ours = [addresses[name] for name in x.pointers if name in addresses]
            numbers = range(at, at + 8 * (len(x.integers) + 2), 8)
            self.launches.append(driver_launch(kernel, [*ours, *numbers]))
            at = numbers.stop

    def run(self, numbers, addresses):
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        with self.lock:
            if numbers is not self.written or stream != self.stream:
                self.written = None  # should writing fail
                self.write(*numbers, stream)
                self.written, self.stream = numbers, stream
            self.write_addresses(*addresses)
            for _, launch in self.launches:
                if error := launch():
                    self.again(launch, error)

    def write(self, grids, integers, stream):
        self.write_integers(*integers)
        for (settings, _), grid in zip(self.launches, grids):
            settings.x, settings.y, settings.z = grid
            settings.stream = stream

    def again(self, launch, error):
        """After an error: the thread may not have used the device yet."""
        if error == NO_CONTEXT:
            torch.cuda.set_device(self.device_index)
            error = launch()
        if error:
            raise RuntimeError(f"the CUDA driver could not launch a kernel: error {error}")


def driver_launch(compiled, parameters):
    """(settings, the driver's call) of a compiled kernel that finds its parameters at these addresses."""
    parameters = (ctypes.c_void_p * len(parameters))(*parameters)
    attribute = Attribute(OVERLAPPED, 0, (1,))
    attributes = (ctypes.addressof(attribute), 1) if compiled.metadata.launch_pdl else (None, 0)
    settings = Settings(1, 1, 1, 32 * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared, None, *attributes)
    settings.kept = compiled, parameters, attribute  # for as long as the driver may read them
    arguments = ctypes.addressof(settings), compiled.function, ctypes.addressof(parameters), None
    return settings, functools.partial(driver().cuLaunchKernelEx, *map(ctypes.c_void_p, arguments))


class Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, with a value that is an int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class Settings(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


@functools.lru_cache(None)
def driver():
    return ctypes.CDLL("libcuda.so.1")


def is_called_as_known(compiled, launch, names):
    """Whether the kernel's parameters are the addresses, the integers, and two addresses that our kernels need not."""
    metadata = compiled.metadata
    expected = ["u64" for name in launch.pointers if name in names]
    expected += ["u32" if x in INT32 else "u64" for x in launch.integers] + ["u64"] * 2
    sizes = (metadata.num_ctas, metadata.global_scratch_size, metadata.profile_scratch_size)
    return re.findall(r"\.param \.(\w+)[^,)]*_param_\d+", compiled.asm["ptx"]) == expected and sizes == (1, 0, 0)


def keeps_launches(device):
    """Whether the installed Triton is one whose launches this module knows, for this device."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return device.type == "cuda" and torch.version.hip is None and version >= (3, 6)


def is_hooked():
    """Whether something, a profiler, wants to see Triton's launches."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
