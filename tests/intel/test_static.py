"""Native code for Intel's GPUs from their offline compiler: what must not be in it, and no more of it than was recorded."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import intel

import static

CONTRACTION_OFF = 3 << 16 | 16, 31  # OpExecutionMode, and after the kernel's id the mode
FMA = 8 << 16 | 12, 26  # OpExtInst of three operands, and after type, result and set OpenCL's number of it


@pytest.fixture(scope="module")
def rows():
    rows = static.measurements()
    print(static.table(rows))
    return rows


def test_every_kernel_is_there(rows):
    """Those of each call on each GPU that this ocloc knows, Iris Xe among them.

    Two of probabilities, and of logits four with a draft's rows and three without.
    """
    rows_of = len(static.VOCABULARIES) * len(static.DTYPES)
    kernels = rows_of * (2 * len(static.DRAFTS) * len(static.SETTINGS) * len(static.SUB_GROUPS) + 4 + 3)
    gpus = static.known_gpus()
    assert "tgllp" in gpus
    assert len(set(map(static.case, rows))) == len(rows) == kernels * len(gpus)
    assert all(row["instructions"] > 100 and row["simd"] == row["sub_group"] for row in rows)


@pytest.mark.parametrize("what", ["spill", "fp64", "atomics"])
def test_what_must_not_be_there(rows, what):
    assert [row for row in rows if row[what]] == []


def test_logits_fuse_what_the_rule_does(rows):
    """A product and a sum in one instruction round once. The SPIR-V says which do, and native code obeys."""
    of_logits = [row for row in rows if row["kernel"] in static.LOGITS_KERNELS]
    assert of_logits and [row for row in of_logits if row["fused"] != row["fma"]] == []
    for kernel in static.logits_kernels(32001, "probs", torch.float32):
        spirv = np.frombuffer(intel.translate_to_spirv(kernel.asm["llir"])[0], np.uint32)
        assert any(np.array_equal(spirv[i : i + 3 : 2], CONTRACTION_OFF) for i in range(len(spirv))), kernel.name
        fmas = np.count_nonzero((spirv[:-4] == FMA[0]) & (spirv[4:] == FMA[1]))
        assert fmas == kernel.asm["llir"].count("call float @llvm.fma.") > 0


@pytest.mark.parametrize(
    "kernels, names",
    [
        (static.serving_kernels, {"sum_chunks", "locate", "write_tokens"}),
        (static.logits_serving_kernels, set(static.LOGITS_KERNELS)),
    ],
    ids=["probs", "logits"],
)
def test_what_must_not_be_there_in_serving(kernels, names):
    jobs = itertools.product({kernel.hash: kernel for kernel in kernels()}.values(), static.known_gpus())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(lambda job: (job[0].name, job[1], static.measure(*job)), jobs))
    assert {name for name, _, _ in rows} == names
    assert [row for row in rows if row[2]["spill"] or row[2]["fp64"] or row[2]["atomics"]] == []


def test_work_groups_fit(rows):
    assert max(row["warps"] * row["sub_group"] for row in rows) <= 512


def test_no_more_instructions_than_recorded(rows):
    recorded = {static.case(row): row["instructions"] for row in static.recorded()}
    known = [row for row in rows if static.case(row) in recorded]
    if not known:
        pytest.skip(f"nothing is recorded of ocloc {static.version()}: static.py --record")
    assert [row for row in known if row["instructions"] > 1.02 * recorded[static.case(row)]] == []


@triton.jit
def offender(x, BLOCK: tl.constexpr):
    values = tl.load(x + tl.arange(0, BLOCK)).to(tl.float64)
    tl.atomic_add(x + tl.arange(0, BLOCK), tl.cumsum(values * values).to(tl.float32))


def test_an_offender_is_found():
    """A running sum of 1,024 float64 in one warp spills, on a GPU that has them."""
    row = static.measure(offender.warmup(torch.float32, 1024, grid=(1,), num_warps=1), "pvc")
    assert row["spill"] > 0 and row["fp64"] > 0 and row["atomics"] > 0
