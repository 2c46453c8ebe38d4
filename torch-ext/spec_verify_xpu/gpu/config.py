"""Launch configurations as data: how a row is cut, and with how many warps each kernel runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    chunk: int  # entries of a row that make one sum; 512 at most with limbs
    chunks: int  # chunks that a program of the first kernel sums
    lanes: int  # threads that read a chunk together, each 4 entries where rows are aligned: a warp, so that it needs no barrier
    limbs: bool  # sum 22-bit limbs in 32 bits
    sum_warps: int
    locate_warps: int

    def segment(self, aligned):
        return min(self.chunk, self.lanes * (4 if aligned else 1))


# NVIDIA converts to native 64-bit integers 5 to 10% faster than to limbs (H200). Two warps, a chunk each, were within 0.2 us
# of the best of 14 shapes for one row as for 256, and one shape means one compiled kernel.
CUDA = Config(chunk=512, chunks=2, lanes=32, limbs=False, sum_warps=2, locate_warps=4)

# Intel: limbs, since Gen12LP has no native 64-bit integers, and one warp a chunk. Nothing spills: what 8 warps of 16 hold is
# within a work-group of any device, and 128 registers a thread. Long chunks spend least on finding the refused position
# again; short ones give every hardware thread work where rows are few.
XPU = Config(chunk=512, chunks=8, lanes=16, limbs=True, sum_warps=8, locate_warps=8)
XPU_FEW_ROWS = Config(chunk=128, chunks=8, lanes=16, limbs=True, sum_warps=8, locate_warps=8)

# Triton's interpreter runs a program's operations one by one, and scans of two numbers entry by entry: few and plain ones.
INTERPRETER = Config(chunk=512, chunks=2, lanes=512, limbs=False, sum_warps=4, locate_warps=4)

CONFIGURATIONS = {"cuda": (CUDA,), "xpu": (XPU, XPU_FEW_ROWS), "cpu": (INTERPRETER,)}  # from long chunks to short
MOST_SUMS = 512  # that the second kernel searches without many registers


def choose(configurations, B, V, threads):
    """The longest chunks that give each of the device's hardware threads one; or else the shortest that make few sums."""
    few_sums = [c for c in configurations if V <= MOST_SUMS * c.chunk] or configurations[:1]
    return next((c for c in few_sums if B * V >= threads * c.chunk), few_sums[-1])
