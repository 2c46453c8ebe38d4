"""Negative controls: the tests on Intel's SPIR-V can fail. Each breaks one thing in the LLVM IR of one kernel."""

import functools
import re

import pytest
import torch

import runtime
from batches import assert_equals_rule, random_batch


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


@pytest.mark.parametrize(
    "kernel, mutation", [("locate", no_barriers), ("locate", wrong_shuffle), ("sum_chunks", mask_off_by_one)]
)
def test_mutation_is_noticed(kernel, mutation):
    """601 entries are two chunks, of rows that are not aligned. The last holds a third of a row, so a draw often ends there."""
    batch = random_batch(200, 2, 601)
    batch.target_probs[..., -1] = batch.target_probs.sum(-1) / 2
    assert_equals_rule(batch, "triton", torch.device("cpu"))

    mutated = []

    @functools.wraps(mutation)
    def mutate(llir):
        result = mutation(llir) if f"@{kernel}(" in llir else llir
        mutated.append(result != llir)
        return result

    runtime.install(mutate=mutate)
    with pytest.raises(AssertionError, match="by the rule"):
        assert_equals_rule(batch, "triton", torch.device("cpu"))
    assert mutated == [kernel == "sum_chunks", kernel == "locate"]
