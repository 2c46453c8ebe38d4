"""Launch configurations as data: how a row is cut, and with how many warps each kernel runs."""

import itertools
from dataclasses import dataclass, replace

from ..rule import BLOCK, MAX_VOCABULARY


@dataclass(frozen=True)
class Config:
    chunk: int  # entries of a row that make one sum; 512 at most with limbs
    chunks: int  # chunks that a program of the first kernel sums, an even number
    lanes: int  # threads' worth of a chunk that is read at once, 4 entries each where rows are aligned
    limbs: bool  # sum 22-bit limbs in 32 bits
    sum_warps: int
    locate_warps: int
    positions: int  # drafts that are tested at once, at least: a warp of them
    sums: tuple  # how many of them the second kernel searches: one compiled kernel for each
    mixed: bool = False  # chunks take the sequences in orders of their own

    def segment(self, aligned):
        return min(self.chunk, self.lanes * (4 if aligned else 1))

    def most(self):
        """The largest vocabulary."""
        return self.chunk * self.sums[-1]

    def capacity(self, V):
        """The least of `sums` that holds those of a row of V entries."""
        return next(x for x in self.sums if x * self.chunk >= V)


# NVIDIA and AMD: native 64-bit integers, 5 to 10% faster than limbs on an H200, where all of this was measured
# (docs/PERFORMANCE.md). A program reads 1,024 entries with 4 warps, few enough for each thread to have all of its loads on the
# way within 32 registers. In CUDA a warp owns a chunk, so its sum needs no barrier. Few kernels are compiled: a pair for each
# of these, one more pair, of the wide one, for rows that are not aligned, and its search in twice as many sums.
CUDA = Config(256, 4, 32, limbs=False, sum_warps=4, locate_warps=4, positions=32, sums=(512,))
CUDA_WIDE = Config(512, 2, 64, limbs=False, sum_warps=4, locate_warps=4, positions=32, sums=(512, 1024), mixed=True)

# Intel: limbs, since Gen12LP has no native 64-bit integers, and one warp a chunk. Nothing spills: what 8 warps of 16 hold is
# within a work-group of any device, and 128 registers a thread. Long chunks spend least on finding the refused position
# again; short ones give every hardware thread work where rows are few.
XPU = Config(512, 8, 16, limbs=True, sum_warps=8, locate_warps=8, positions=16, sums=(128, 256, 512, 1024))
XPU_FEW_ROWS = Config(128, 8, 16, limbs=True, sum_warps=8, locate_warps=8, positions=16, sums=(128, 256, 512))

# Triton's interpreter runs a program's operations one by one, and scans of two numbers entry by entry: few and plain ones.
INTERPRETER = Config(512, 2, 512, limbs=False, sum_warps=4, locate_warps=4, positions=16, sums=(128, 256, 512, 1024))


def for_cuda(B, V, aligned, threads):
    return CUDA if aligned and V <= CUDA.most() else CUDA_WIDE


def for_xpu(B, V, aligned, threads):
    return XPU_FEW_ROWS if B * V < threads * XPU.chunk and V <= XPU_FEW_ROWS.most() else XPU


def for_interpreter(B, V, aligned, threads):
    return INTERPRETER


# By device type: the configuration for B rows of V entries on a device that this many warps fill.
CONFIGURATIONS = {"cuda": for_cuda, "xpu": for_xpu, "cpu": for_interpreter}


def variants(device_type, threads, vocabulary=None):
    """{(configuration, aligned, sums)}: all that calls on the device may take, of one vocabulary or of any."""
    largest = (config.chunk * sums for config in (CUDA, CUDA_WIDE, XPU, XPU_FEW_ROWS) for sums in config.sums)
    found = set()
    for V in [vocabulary] if vocabulary else [min(V, MAX_VOCABULARY // 16 * 16) for V in largest]:
        for B, aligned in itertools.product((1, 2**20), {V % 16 == 0, False}):  # few rows, and many
            config = CONFIGURATIONS[device_type](B, V, aligned, threads)
            found.add((config, aligned, config.capacity(V)))
    return found


@dataclass(frozen=True)
class LogitsConfig:
    limbs: bool  # rows are read without masks, and quotients of floats are not trusted
    most_blocks: int  # that a program of the first kernel weighs
    weigh_warps: int
    share_warps: int
    sum_warps: int
    draw_warps: int
    positions: int
    blocks: tuple  # how many of a row the second and fourth kernel take at once
    waves: int = 4  # rows go in stages where their blocks would fill the device so many times


# A warp that owns a block of 1,024 logits needs no barrier for its maximum and sum.
LOGITS_CUDA = LogitsConfig(False, 8, weigh_warps=1, share_warps=4, sum_warps=2, draw_warps=4, positions=32, blocks=(128, 512))
LOGITS_XPU = LogitsConfig(True, 8, weigh_warps=8, share_warps=8, sum_warps=16, draw_warps=16, positions=16, blocks=(128, 512))
LOGITS_INTERPRETER = LogitsConfig(False, 2, 1, 1, 1, 1, positions=16, blocks=(4, 32, 512))
LOGITS = {"cuda": LOGITS_CUDA, "xpu": LOGITS_XPU, "cpu": LOGITS_INTERPRETER}


def logits_of(device_type, V):
    """(configuration, how many blocks are taken at once) for rows of V logits at most."""
    config = LOGITS[device_type]
    return config, next(n for n in config.blocks if n * BLOCK >= V)


def logits_variants(device_type, vocabulary=None):
    """All that calls from logits may take, as `variants`: in stages, whose kernels are those of calls without and more."""
    config = replace(LOGITS[device_type], waves=0)
    sizes = [logits_of(device_type, vocabulary)[1]] if vocabulary else config.blocks
    return [(config, aligned, n) for n in sizes for aligned in {(vocabulary or 0) % 16 == 0, False}]
