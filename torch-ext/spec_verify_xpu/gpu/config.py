"""Launch configurations as data: how a row is cut, and with how many warps each kernel runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    chunk: int  # entries of a row that make one sum; 512 at most with limbs
    chunks: int  # chunks that a program of the first kernel sums
    lanes: int  # threads' worth of a chunk that is read at once, 4 entries each where rows are aligned
    limbs: bool  # sum 22-bit limbs in 32 bits
    sum_warps: int
    locate_warps: int

    def segment(self, aligned):
        return min(self.chunk, self.lanes * (4 if aligned else 1))


MOST_SUMS = 512  # of a row, that the second kernel searches without many registers

# NVIDIA and AMD: native 64-bit integers, 5 to 10% faster than limbs on an H200, where all of this was measured. A row that
# is read in one piece has all of its loads in flight at once, which is best where rows are few and memory is cold. Where
# they are many, programs of several chunks spend less on finding the refused position again. Where hardly any run at once,
# four warps read a chunk together.
CUDA_ONE_ROW = Config(chunk=512, chunks=1, lanes=512, limbs=False, sum_warps=4, locate_warps=4)
CUDA_FEW_ROWS = Config(chunk=512, chunks=1, lanes=128, limbs=False, sum_warps=1, locate_warps=4)
CUDA = Config(chunk=256, chunks=4, lanes=32, limbs=False, sum_warps=4, locate_warps=4)
CUDA_WIDE = Config(chunk=512, chunks=2, lanes=128, limbs=False, sum_warps=2, locate_warps=4)

# Intel: limbs, since Gen12LP has no native 64-bit integers, and one warp a chunk. Nothing spills: what 8 warps of 16 hold is
# within a work-group of any device, and 128 registers a thread. Long chunks spend least on finding the refused position
# again; short ones give every hardware thread work where rows are few.
XPU = Config(chunk=512, chunks=8, lanes=16, limbs=True, sum_warps=8, locate_warps=8)
XPU_FEW_ROWS = Config(chunk=128, chunks=8, lanes=16, limbs=True, sum_warps=8, locate_warps=8)

# Triton's interpreter runs a program's operations one by one, and scans of two numbers entry by entry: few and plain ones.
INTERPRETER = Config(chunk=512, chunks=2, lanes=512, limbs=False, sum_warps=4, locate_warps=4)


def for_cuda(B, V, threads):
    if B * V < threads * CUDA_ONE_ROW.chunk / 8:
        return CUDA_ONE_ROW
    if B * V < threads * CUDA_FEW_ROWS.chunk:
        return CUDA_FEW_ROWS
    return CUDA if V <= MOST_SUMS * CUDA.chunk else CUDA_WIDE


def for_xpu(B, V, threads):
    few_rows = B * V < threads * XPU.chunk
    return XPU_FEW_ROWS if few_rows and V <= MOST_SUMS * XPU_FEW_ROWS.chunk else XPU


def for_interpreter(B, V, threads):
    return INTERPRETER


# By device type: the configuration for B rows of V entries on a device that this many warps fill.
CONFIGURATIONS = {"cuda": for_cuda, "xpu": for_xpu, "cpu": for_interpreter}
