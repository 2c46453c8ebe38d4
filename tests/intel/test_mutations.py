"""Negative controls: the tests on Intel's SPIR-V can fail. Each breaks one thing in the LLVM IR of one kernel."""

import functools
import os
import re
import subprocess
import sys

import pytest
import torch

import runtime
import spec_verify_xpu as sv
from batches import assert_equals_rule, random_batch
from spec_verify_xpu import rule
from spec_verify_xpu.gpu import config

KERNELS = ("sum_chunks", "locate")
LOGITS_KERNELS = ("weigh_blocks", "share_rows", "draw")


def no_barriers(llir):
    """Warps read each other's partial results before they are written."""
    return re.sub(r"\n.* call spir_func void @_Z7barrierj\(.*", "", llir)


def wrong_shuffle(llir):
    """A running sum adds the neighbour after the next."""
    return re.sub(r"(@_Z20sub_group_shuffle_up\w+\(i\d+ %\d+, i32) 1\)", r"\1 2)", llir)


def mask_off_by_one(llir):
    """The entry past the vocabulary counts; the load there repeats the last one."""
    for mask in re.findall(r"uitofp i1 (%\d+) to float", llir):
        llir = re.sub(rf"( {mask} = icmp s[lg])t ", r"\1e ", llir)
    return llir


def split_fma(llir):
    """A fused product and sum become two operations, each rounded."""
    fma = r"%(\d+) = (?:tail )?call float @llvm\.fma\.f32\(float (\S+), float (\S+), float (\S+)\)"
    return re.sub(fma, r"%product\1 = fmul float \2, \3\n  %\1 = fadd float %product\1, \4", llir)


def check_probs():
    """Parity with the rule. 601 entries are two chunks, of rows that are not aligned.

    The last entry holds a third of a row, so that a draw often ends there.
    """
    batch = random_batch(200, 2, 601)
    batch.target_probs[..., -1] = batch.target_probs.sum(-1) / 2
    assert_equals_rule(batch, "triton", torch.device("cpu"))


def check_logits():
    """Draws at both ends of an entry's interval by the rule, in five blocks, of rows that are not aligned."""
    row = 3 * torch.randn(4113, generator=torch.Generator().manual_seed(0))
    P = torch.tensor(rule.probabilities(row.tolist(), 1.0))
    ids = torch.arange(0, 4113, 40)
    ends = P.cumsum(0)[ids]
    for uniform in (ends - P[ids] << 19, (ends << 19) - 1):
        found = sv.sample_logits(row.expand(len(ids), -1), uniform, impl="triton")
        assert torch.equal(found, ids), f"{found}, by the rule {ids}"


def check(kernel, mutation):
    """One of these, a kernel mutated."""
    for configurations in (config.CONFIGURATIONS, config.LOGITS):
        configurations["cpu"] = configurations["xpu"]

    @functools.wraps(mutation)
    def mutate(llir):
        result = mutation(llir) if f"@{kernel}(" in llir else llir
        print("changed" if result != llir else "unchanged", flush=True)
        return result

    runtime.install(mutate=mutate)
    if kernel in KERNELS:
        check_probs()
    else:
        check_logits()


def in_a_process(kernel, mutation, cache):
    """A process of its own: a broken kernel may read where there is nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, __file__, kernel, mutation.__name__]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "kernel, mutation",
    [
        ("locate", no_barriers),
        ("locate", wrong_shuffle),
        ("sum_chunks", mask_off_by_one),
        ("weigh_blocks", split_fma),
        ("share_rows", split_fma),
        ("draw", split_fma),
    ],
)
def test_mutation_is_noticed(kernel, mutation, tmp_path):
    """By a mismatch, or by a crash."""
    result = in_a_process(kernel, mutation, tmp_path)
    compiled = KERNELS if kernel in KERNELS else LOGITS_KERNELS
    assert result.stdout.split() == ["changed" if kernel == name else "unchanged" for name in compiled], result.stderr
    assert "by the rule" in result.stderr or result.returncode < 0, result.stderr


@pytest.mark.parametrize("compiled", [KERNELS, LOGITS_KERNELS], ids=["probs", "logits"])
def test_what_is_not_mutated_passes(compiled, tmp_path):
    result = in_a_process(compiled[0], runtime.unchanged, tmp_path)
    assert result.returncode == 0 and result.stdout.split() == ["unchanged"] * len(compiled), result.stderr


if __name__ == "__main__":
    name = sys.argv[2]
    check(sys.argv[1], getattr(runtime, name) if name == "unchanged" else globals()[name])
