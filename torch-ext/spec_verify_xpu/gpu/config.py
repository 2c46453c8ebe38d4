"""Launch configurations as data: how a row is cut, and with how many warps each kernel runs."""

import itertools
from dataclasses import dataclass, replace
from math import inf

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
    limbs: bool  # rows are read without masks
    most_blocks: int  # that a program of the first kernel weighs
    most_pairs: int  # of blocks whose residual a program sums
    segment: int  # entries of a pair that are read at once
    weigh_warps: int
    share_warps: int
    sum_warps: int
    draw_warps: int
    positions: int
    blocks: tuple  # how many of a row the second and fourth kernel take at once
    fills: float  # for calls whose blocks, with so many warps each, fill the device less often
    in_stages: bool = False  # the rows behind a refused draft are left out

    def tile(self, itemsize, aligned):
        """(segment, how many of its entries a thread sums by itself): all, where that is left to the compiler."""
        return self.segment, BLOCK if self.segment == BLOCK else 16 // itemsize if aligned else 1


# A warp that owns a block of 1,024 logits needs no barrier for its maximum and sums, and has all its loads on the way at once.
# Where blocks are few, more warps for each are sooner done. Where they are many a residual is summed by segments, for which
# fewer registers do, so that more programs take turns.
LOGITS_CUDA = LogitsConfig(
    False, 3, 1, BLOCK, weigh_warps=1, share_warps=4, sum_warps=2, draw_warps=8, positions=32, blocks=(128, 512), fills=4
)
LOGITS_CUDA_FEW = replace(LOGITS_CUDA, most_blocks=2, weigh_warps=2, sum_warps=4, fills=3)
LOGITS_CUDA_MANY = replace(LOGITS_CUDA, segment=256, sum_warps=1, fills=inf, in_stages=True)

LOGITS_XPU = LogitsConfig(
    True, 8, 8, BLOCK, weigh_warps=8, share_warps=8, sum_warps=16, draw_warps=16, positions=16, blocks=(128, 512), fills=4
)
LOGITS_XPU_MANY = replace(LOGITS_XPU, fills=inf, in_stages=True)

LOGITS_INTERPRETER = LogitsConfig(False, 2, 2, BLOCK, 1, 1, 1, 1, positions=16, blocks=(4, 32, 512), fills=4)
LOGITS_INTERPRETER_MANY = replace(LOGITS_INTERPRETER, segment=256, fills=inf, in_stages=True)

# By device type, those for fewer blocks first.
LOGITS = {
    "cuda": (LOGITS_CUDA_FEW, LOGITS_CUDA, LOGITS_CUDA_MANY),
    "xpu": (LOGITS_XPU, LOGITS_XPU_MANY),
    "cpu": (LOGITS_INTERPRETER, LOGITS_INTERPRETER_MANY),
}


def logits_of(device_type, rows, V, threads):
    """(configuration, how many blocks of a row are taken at once) for so many rows of V logits at most."""
    blocks = -(-V // BLOCK)
    config = next(x for x in LOGITS[device_type] if rows * blocks * x.weigh_warps < x.fills * threads)
    return config, next(n for n in config.blocks if n >= blocks)


def logits_variants(device_type, vocabulary=None):
    """All that calls from logits may take, as `variants`."""
    found = []
    for config in LOGITS[device_type]:
        sizes = [n for n in config.blocks if n * BLOCK >= vocabulary][:1] if vocabulary else config.blocks
        found += [(config, aligned, n) for n in sizes for aligned in {(vocabulary or 0) % 16 == 0, False}]
    return found
