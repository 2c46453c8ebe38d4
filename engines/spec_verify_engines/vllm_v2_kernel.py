"""What vllm_v2.by_torch makes, by one launch of Triton: there a dozen operations take the host longer than the verification."""

import functools

import torch
import triton
import triton.language as tl

from spec_verify_xpu.gpu import launch

INPUTS = "draft_sampled", "cu_num_logits", "pos", "idx_mapping", "temperature", "seed"
POINTERS = (*INPUTS, "numbers", "temperatures")


@triton.jit(do_not_specialize=[*POINTERS, "T"])
def arrange(
    draft_sampled, cu_num_logits, pos, idx_mapping, temperature, seed, numbers, temperatures, T, POSITIONS: tl.constexpr,
    wait: tl.constexpr, release: tl.constexpr,
):  # fmt: skip
    """grid (R,): each program writes what belongs to its request."""
    if wait is not None:
        release()  # the next kernel waits for all of this one before it reads anything
        wait()
    r = tl.program_id(0)
    R = tl.num_programs(0)
    start = tl.load(cu_num_logits + r).to(tl.int64)
    end = tl.load(cu_num_logits + r + 1).to(tl.int64)
    state = tl.load(idx_mapping + r).to(tl.int64)
    i = tl.arange(0, POSITIONS)
    is_draft = i < end - start - 1
    tokens = tl.load(draft_sampled + start + 1 + i, mask=is_draft, other=-1)
    tl.store(numbers + start - r + i, tokens.to(tl.int64), mask=is_draft)
    cu_drafts = numbers + T + r
    tl.store(cu_drafts, start - r)
    tl.store(cu_drafts + 1, end - r - 1)  # as the next program does
    tl.store(cu_drafts + R + 1, tl.load(seed + state).to(tl.int64))
    tl.store(cu_drafts + 2 * R + 1, tl.load(pos + start).to(tl.int64))
    of_draft = tl.load(temperature + state).to(tl.float32)
    tl.store(temperatures + r, tl.where(of_draft == 0, 0.0, 1.0))
    tl.store(temperatures + R + r, of_draft)


@functools.lru_cache(4096)
def arrange_launch(device, R, T, K):
    on = launch.device_facts(device)
    options = {"num_warps": 1, **on.locate_options}
    return launch.Launch(arrange, POINTERS, (R, 1, 1), (T,), (launch.power_of_2(K),), options, (on.wait, on.release))


def by_triton(draft_sampled, cu_num_logits, pos, idx_mapping, temperature, seed, K):
    """As vllm_v2.by_torch. All that are integers are one allocation [T + R + 1 + R + R], and all floats another [2, R]."""
    (N,), (R,), device = draft_sampled.shape, idx_mapping.shape, draft_sampled.device
    sizes = N - R, R + 1, R, R
    numbers = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    temperatures = torch.empty(2, R, dtype=torch.float32, device=device)
    inputs = draft_sampled, cu_num_logits, pos, idx_mapping, temperature, seed
    tensors = *[x.contiguous() for x in inputs], numbers, temperatures
    with launch.on_device(device):
        keeps = launch.device_facts(device).keeps
        launch.launch([arrange_launch(device, R, N - R, K)], dict(zip(POINTERS, tensors)), device, keeps)
    return *numbers.split_with_sizes(sizes), *temperatures.unbind()
