"""Negative controls: the tests on Intel's SPIR-V can fail. Each breaks one thing in the LLVM IR of one kernel."""

import functools
import os
import re
import subprocess
import sys

import pytest
import torch

import runtime
from batches import assert_equals_rule, random_batch
from spec_verify_xpu.gpu import config


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


def check(kernel, mutation):
    """Parity with the rule, one kernel mutated. 601 entries are two chunks, of rows that are not aligned.

    The last entry holds a third of a row, so that a draw often ends there.
    """
    batch = random_batch(200, 2, 601)
    batch.target_probs[..., -1] = batch.target_probs.sum(-1) / 2
    config.CONFIGURATIONS["cpu"] = config.CONFIGURATIONS["xpu"]

    @functools.wraps(mutation)
    def mutate(llir):
        result = mutation(llir) if f"@{kernel}(" in llir else llir
        print("changed" if result != llir else "unchanged", flush=True)
        return result

    runtime.install(mutate=mutate)
    assert_equals_rule(batch, "triton", torch.device("cpu"))


def in_a_process(kernel, mutation, cache):
    """A process of its own: a broken kernel may read where there is nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, __file__, kernel, mutation.__name__]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "kernel, mutation", [("locate", no_barriers), ("locate", wrong_shuffle), ("sum_chunks", mask_off_by_one)]
)
def test_mutation_is_noticed(kernel, mutation, tmp_path):
    """By a mismatch, or by a crash."""
    result = in_a_process(kernel, mutation, tmp_path)
    assert result.stdout.split() == ["changed" if kernel == name else "unchanged" for name in ("sum_chunks", "locate")]
    assert "by the rule" in result.stderr or result.returncode < 0, result.stderr


def test_what_is_not_mutated_passes(tmp_path):
    result = in_a_process("locate", runtime.unchanged, tmp_path)
    assert result.returncode == 0 and result.stdout.split() == ["unchanged"] * 2, result.stderr


if __name__ == "__main__":
    name = sys.argv[2]
    check(sys.argv[1], getattr(runtime, name) if name == "unchanged" else globals()[name])
