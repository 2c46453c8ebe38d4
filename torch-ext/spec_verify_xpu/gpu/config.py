"""Launch configurations as data: how a row is cut, and with how many warps each kernel runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    chunk: int  # entries of a row that make one sum; 512 at most with limbs
    limbs: bool  # sum 22-bit limbs in 32 bits
    chunks: int  # chunks that a program of the first kernel sums
    sum_warps: int
    locate_warps: int


# Native 64-bit conversion is faster on NVIDIA by 5 to 10% (H200). 512 entries a program fill the GPU where rows are few;
# where they are many, fewer and larger programs spend less on finding the refused position again.
CUDA_FEW_ROWS = Config(chunk=512, limbs=False, chunks=1, sum_warps=4, locate_warps=4)
CUDA = Config(chunk=1024, limbs=False, chunks=1, sum_warps=4, locate_warps=8)

# No native 64-bit integers on Gen12LP, so limbs; 8 warps are the fewest that spill no registers.
XPU = Config(chunk=512, limbs=True, chunks=2, sum_warps=8, locate_warps=8)


def configuration(device_type, B, V):
    """The launch configuration for B rows of V entries. CPU tensors (Triton's interpreter) take what Intel GPUs take."""
    if device_type == "cuda":
        return CUDA_FEW_ROWS if B * V <= 2**18 else CUDA
    return XPU
