"""The tests of the kernels that read logits, on Intel's SPIR-V: those that add a way to compile them, or content."""

import pytest
import torch
import triton
import triton.language as tl

import runtime
from batches import WARM, logits_batch
from spec_verify_xpu import rule
from spec_verify_xpu.gpu.numbers import divide, scale_of
from test_logits import (  # noqa: F401
    assert_equals_rule,
    sequences,
    test_draft_slots,
    test_dtypes_of_draft_and_target_differ,
    test_every_configuration,
    test_every_entry_of_a_row,
    test_every_half,
    test_hostile_content,
    test_lengths_and_options,
    test_offsets_that_are_not_monotone,
    test_ragged_equals_dense_and_the_rule,
    test_residual_without_mass,
    test_rows_of_interest,
    test_shape,
    test_temperature_of_the_draft,
    test_temperature_that_is_a_number,
    test_temperatures_of_a_tensor,
    test_ten_thousand_rows,
    test_vocabularies_differ,
    test_what_is_masked_never_comes,
)


@triton.jit
def divide_all(dividends, divisors, quotients):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(quotients + i, divide(tl.load(dividends + i), tl.load(divisors + i).to(tl.uint32)))


@triton.jit
def scale_all(temperatures, scales):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(scales + i, scale_of(tl.load(temperatures + i), True))


def test_divide():
    """A million at random, and all pairs of ends and of what lies at a multiple of the divisor."""
    g = torch.Generator().manual_seed(0)
    divisors = torch.randint(2**30, 2**31 + 1, (2**20,), generator=g)
    dividends = torch.randint(2**60, 2**61, (2**20,), generator=g)
    ends = torch.tensor([*range(2**30, 2**30 + 8), *range(2**31 - 7, 2**31 + 1)])
    divisors[: 2**18] = ends[torch.randint(len(ends), (2**18,), generator=g)]
    multiples = dividends[2**17 : 2**19] // divisors[2**17 : 2**19] * divisors[2**17 : 2**19]
    dividends[2**17 : 2**19] = (multiples + torch.randint(-1, 2, multiples.shape, generator=g)).clamp(2**60, 2**61 - 1)
    dividends[:16], divisors[:16] = torch.tensor([2**60, 2**61 - 1] * 8), ends
    quotients = torch.empty(2**20, dtype=torch.int32)
    divide_all[(1024,)](dividends, divisors, quotients, num_warps=8)
    assert torch.equal(quotients.long(), dividends // divisors)


def test_scale_of():
    """Each of the 2**23 mantissas of a temperature, at exponents that change from one to the next; and the ends."""
    fields = torch.arange(2**23) + (67 + torch.arange(2**23) % 120 << 23)
    temperatures = fields.to(torch.int32).view(torch.float32)
    temperatures[: len(WARM)] = torch.tensor(WARM)
    scales = torch.empty_like(temperatures)
    scale_all[(2**13,)](temperatures, scales, num_warps=8)
    clamped = temperatures.double().clamp(2.0**-60, 2.0**60)
    assert torch.equal(scales, (rule.LOG2E / clamped).float())


@pytest.mark.skipif(runtime.SUB_GROUP == 32, reason="half a minute to compile, and half-precision values are tested above")
@pytest.mark.parametrize("dtype, uniform", [(torch.float16, torch.float64), (torch.bfloat16, torch.float32)], ids=str)
def test_dtypes(dtype, uniform, impl, device):
    """Narrow logits, of rows that are aligned and not, with uniforms of each dtype and narrow tokens."""
    for V in (48, 47):
        batch = logits_batch(12, 1, V, dtype=dtype, uniform=uniform, tokens=torch.int32, seed=V)
        assert_equals_rule(batch, impl, device)
