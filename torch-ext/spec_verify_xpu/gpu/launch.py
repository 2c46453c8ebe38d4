"""Host side of the Triton kernels: outputs, scratch, strides, grids, and the device they run on."""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Callable, NamedTuple, Optional

import torch
import triton

from ..rule import BLOCK
from .config import CONFIGURATIONS, logits_of, logits_variants, variants
from .handles import Launch, is_hooked, keeps_launches, kept_launches, key_of, launch, numbers_of
from .kernels import HEADER, locate, sum_chunks, write_tokens
from .logits import draw, share_rows, sum_residual, weigh_blocks


def runs_on():
    """The type of the tensors that Triton's kernels run on here: "cpu" under its interpreter, None without a GPU."""
    if not isinstance(sum_chunks, triton.runtime.JITFunction):
        return "cpu"
    try:
        return triton.runtime.driver.active.get_active_torch_device().type
    except RuntimeError:  # Triton finds no GPU that it has a driver for
        return None


def require_triton(device_type):
    """Raise where Triton cannot run on tensors of this device type."""
    here = runs_on()
    if here is None:
        raise ValueError('impl: expected a GPU with a Triton driver for "triton", got none')
    if here != device_type:
        raise ValueError(f'impl: "triton" runs on {here} tensors here, got {device_type} tensors')


class Plan(NamedTuple):
    """What a call of one layout comes to."""

    words: int  # of int64 scratch: what sum_chunks tells locate
    greedy_words: int  # and, behind it, the largest entries of greedy sequences' chunks
    launches: tuple[Launch, ...]


INPUTS = ("seed", "offset", "lengths", "cu_drafts", "greedy", "bonus_tokens", "scratch", "bests")
SUM_CHUNKS = ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", *INPUTS)
OUTPUTS = "accepted", "next_token", "num_emitted", "emitted"
LOCATE = ("draft_tokens", "draft_probs", "target_probs", "uniform_sample", *INPUTS, *OUTPUTS)
OF_LOGITS = ("lengths", "cu_drafts", "greedy", "bonus_tokens", "temperature", "draft_slots", "draft_temperature", "scratch")
ROWS, SEEDS = ("draft_probs", "target_probs"), ("seed", "offset")
WEIGH_BLOCKS = SUM_RESIDUAL = ("draft_tokens", *ROWS, *OF_LOGITS)
SHARE_ROWS = ("draft_tokens", *ROWS, "uniform_accept", *SEEDS, *OF_LOGITS)
DRAW = ("draft_tokens", *ROWS, "uniform_sample", *SEEDS, *OF_LOGITS, *OUTPUTS)


def configure(call, aligned):
    """(configuration, how many sums are searched) for a call. aligned says whether rows may be read 16 bytes at once."""
    (B,), V, device = call.accepted.shape, call.target_probs.shape[-1], call.accepted.device
    if call.logits:
        rows = B * sum(rows_of_logits(call)[1:])
        return logits_of(device.type, rows, max(x.shape[-1] for x in rows_of(call)), device_facts(device).threads)
    rows = B * (call.max_drafts + 1) if call.all_greedy else B
    config = CONFIGURATIONS[device.type](rows, V, aligned, device_facts(device).threads)
    return config, config.capacity(V)


def plan(call, aligned, config, sums):
    """From shapes, strides and dtypes of a call that has sequences."""
    if call.logits:
        return plan_of_logits(call, aligned, config, sums)
    (B,), K, T, V = call.accepted.shape, call.max_drafts, call.draft_tokens.numel(), call.target_probs.shape[-1]
    on = device_facts(call.accepted.device)
    chunks = ceil_div(V, config.chunk)
    programs = ceil_div(chunks, config.chunks)
    has_greedy = call.all_greedy or call.greedy is not None
    sizes = (K, T, V if call.draft_probs is None else call.draft_probs.shape[-1], V, chunks)
    strides = (*row_strides(call.draft_probs), *row_strides(call.target_probs))
    sum_launch = Launch(
        sum_chunks, SUM_CHUNKS, (B, programs, K + 1 if call.all_greedy else 1),
        integers=(*sizes, *strides),
        constants=(
            is_float64(call.uniform_accept), max(config.positions, power_of_2(K)), aligned, config.chunk,
            config.segment(aligned), config.limbs, config.chunks, config.mixed,
        ),
        options={"num_warps": config.sum_warps, **on.sum_options},
        overlap=(on.wait, on.release),
    )  # fmt: skip
    locate_launch = Launch(
        locate, LOCATE, (B, 1, 1),
        integers=(*sizes, programs, *strides, 0 if call.emitted is None else call.emitted.stride(0)),
        constants=(
            is_float64(call.uniform_sample), call.purpose, max(config.positions, power_of_2(K + 1)), aligned, config.chunk,
            config.limbs, sums,
        ),
        options={"num_warps": config.locate_warps, **on.locate_options},
        overlap=(on.wait,),
    )  # fmt: skip
    words = B * (HEADER.value + chunks + chunks % 2)
    return Plan(words, (B + T) * 2 * programs if has_greedy else 0, (sum_launch, locate_launch))


def plan_of_logits(call, aligned, config, capacity):
    """The same for logits."""
    (B,), K, T, V = call.accepted.shape, call.max_drafts, call.draft_tokens.numel(), call.target_probs.shape[-1]
    on = device_facts(call.accepted.device)
    S, V_draft = (0, V) if call.draft_probs is None else (len(call.draft_probs), call.draft_probs.shape[-1])
    blocks = ceil_div(max(V, V_draft), BLOCK)
    most, draft_rows, target_rows = rows_of_logits(call)
    sizes = T, S, V_draft, V, blocks
    strides = *row_strides(call.draft_probs), *row_strides(call.target_probs), call.temperature_fields
    how = max(config.positions, power_of_2(K + 1)), aligned, config.limbs

    def blocks_of(rows, warps, limit):
        """How many of so many rows a program takes, so that all programs run at once, as far as the limit allows."""
        return min(limit, ceil_div(B * rows * blocks * warps, on.threads))

    def options(warps, more=on.locate_options):
        return {"num_warps": warps, **more, **on.exact}

    launches = []
    for first, positions in stages(target_rows) if config.in_stages else [(0, target_rows)]:
        stage_rows = positions + max(min(positions, draft_rows - first), 0)
        count = blocks_of(stage_rows, config.weigh_warps, config.most_blocks)
        launches += (
            Launch(
                weigh_blocks, WEIGH_BLOCKS, (B, ceil_div(blocks, count), stage_rows),
                (first, positions, most, *sizes, count, *strides), how,
                options(config.weigh_warps, on.weigh_options), (on.wait, on.release),
            ),
            Launch(
                share_rows, SHARE_ROWS, (B, stage_rows, 1), (first, positions, most, *sizes, *strides),
                (*how, is_float64(call.uniform_accept), capacity), options(config.share_warps), (on.wait, on.release),
            ),
        )  # fmt: skip
    if call.draft_probs is not None:
        pairs = blocks_of(1, config.sum_warps, config.most_pairs)
        itemsize = max(x.dtype.itemsize for x in rows_of(call))
        launches.append(
            Launch(
                sum_residual, SUM_RESIDUAL, (B, ceil_div(blocks, pairs), 1), (most, *sizes, pairs, *strides),
                (*how, *config.tile(itemsize, aligned)), options(config.sum_warps), (on.wait, on.release),
            )
        )  # fmt: skip
    launches.append(
        Launch(
            draw, DRAW, (B, 1, 1), (K, *sizes, *strides, 0 if call.emitted is None else call.emitted.stride(0)),
            (*how, is_float64(call.uniform_sample), call.purpose, capacity), options(config.draw_warps), (on.wait,),
        )
    )  # fmt: skip
    even, rows = blocks + blocks % 2, most + 1 + draft_rows
    return Plan(B * (rows * 3 * even + 2 * most + 1 + HEADER.value + 2 * even), 0, tuple(launches))


def rows_of_logits(call):
    """(most drafts of a sequence, rows of the draft that it may have, rows of the target)"""
    most = min(call.max_drafts, call.draft_tokens.numel())
    target_rows = most + 1 if call.bonus_tokens is None else max(most, 1)  # a grid of 0 is refused by the driver
    return most, 0 if call.draft_probs is None else most, target_rows


def stages(positions):
    """Which positions are weighed together, [(the first, how many)]: twice as many each time, since ever fewer drafts stand."""
    first = 0
    while first < positions:
        yield first, min(first + 2, positions - first)
        first += first + 2


def verify(call):
    """See ops.Call."""
    if call.accepted.numel() == 0:
        return
    call, aligned = without_empty_rows(call), is_aligned(call)
    run(call, aligned, *configure(call, aligned))


def run(call, aligned, config, sums):
    device = call.accepted.device
    words, greedy_words, launches = plan(call, aligned, config, sums)
    scratch = torch.empty(words + greedy_words, dtype=torch.int64, device=device)
    tensors = {**as_read(call), "scratch": scratch, "bests": scratch[words:] if greedy_words else scratch}
    with on_device(device):
        launch(launches, tensors, device, device_facts(device).keeps)


def warmup(call, vocabulary):
    """Run a small call in every way that calls of its dtypes may run. Triton keeps what it compiles, in memory and on disk."""
    device = call.accepted.device
    if call.logits:
        ways = logits_variants(device.type, vocabulary)
    else:
        ways = variants(device.type, device_facts(device).threads, vocabulary)
    for config, aligned, sums in ways:
        run(call, aligned, config, sums)


def without_empty_rows(call):
    """The call without a draft's rows if it has no drafts: there is no row that a load could touch."""
    absent = dict.fromkeys(("draft_probs", "draft_slots", "draft_temperature"))
    return call if call.draft_tokens.numel() else call._replace(**absent)


def as_read(call):
    """The call's tensors, {name: tensor or None}, as the kernels read them: the small ones contiguous."""
    as_they_are = *ROWS, *OUTPUTS
    return {
        name: x if x is None else fields(x if name in as_they_are else x.contiguous())
        for name, x in call.tensors().items()
    }  # fmt: skip


def kept(call):
    """Of a call that has run what repeats.py needs: (scratch and greedy scratch in words, aligned, launch).

    `aligned` is None where no addresses would make its rows aligned, and `launch` takes the addresses of its tensors, scratch
    and greedy scratch. None where launches are not kept, or the kernels read copies of tensors.
    """
    device, tensors = call.accepted.device, as_read(call)
    copied = any(x is not None and x.data_ptr() != tensors[name].data_ptr() for name, x in call.tensors().items())
    is_empty = call.draft_tokens.numel() == 0 or call.accepted.numel() == 0
    if copied or is_empty or not device_facts(device).keeps or is_hooked():
        return None
    aligned = is_aligned(call)
    words, greedy_words, launches = plan(call, aligned, *configure(call, aligned))
    scratch = call.accepted.new_empty(0, dtype=torch.int64)
    found = kept_launches.get(key_of(launches, {**tensors, "scratch": scratch, "bests": scratch}, device))
    aligned = aligned if can_be_aligned(call) else None
    return found and (words, greedy_words, aligned, functools.partial(found.run, numbers_of(launches)))


def emit(draft_tokens, accepted, next_token, pad, emitted):
    """See `api.emit`."""
    (B, K), device = draft_tokens.shape, emitted.device
    if B == 0:
        return
    names, tensors = ("draft_tokens", "accepted", "next_token", "emitted"), (draft_tokens, accepted, next_token)
    constants = (max(16, power_of_2(K + 1)),)
    write = Launch(write_tokens, names, (B, 1, 1), (pad, K, emitted.stride(0)), constants, {"num_warps": 1})
    with on_device(device):
        tensors = dict(zip(names, (*(x.contiguous() for x in tensors), emitted)))
        launch([write], tensors, device, device_facts(device).keeps)


def ceil_div(n, d):
    return -(-n // d)  # triton.cdiv is for kernels, and slow on the host


def power_of_2(n):
    """The least that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def fields(x):
    """float64 as int64, its fields, since no kernel computes in fp64; bool as bytes."""
    return x.view({torch.float64: torch.int64, torch.bool: torch.uint8}.get(x.dtype, x.dtype))


def is_float64(x):
    return x is not None and x.dtype == torch.float64


def row_strides(probs):
    """(stride of a sequence, stride of a row). Ragged rows belong to no sequence."""
    return (0, 0) if probs is None else (0, *probs.stride()[:-1])[-2:]


def rows_of(call):
    return [x for x in (call.draft_probs, call.target_probs) if x is not None]


def can_be_aligned(call):
    """Whether every row holds a multiple of 16 entries, and they are as far apart."""
    return all(n % 16 == 0 for x in rows_of(call) for n in (x.shape[-1], *row_strides(x)))


def is_aligned(call):
    """Whether, besides, every row starts at a multiple of 16 bytes."""
    return can_be_aligned(call) and all(x.data_ptr() % 16 == 0 for x in rows_of(call))


@dataclass(frozen=True)
class DeviceFacts:
    """What is done on one device alone."""

    threads: int = 4  # warps that fill it
    keeps: bool = False  # whether launches are kept by handles.py
    release: Optional[Callable] = None  # what kernels call where launches overlap
    wait: Optional[Callable] = None
    sum_options: dict = field(default_factory=dict)
    locate_options: dict = field(default_factory=dict)
    weigh_options: dict = field(default_factory=dict)
    exact: dict = field(default_factory=dict)  # products and sums are fused where that is written, and nowhere else


@functools.lru_cache(None)
def device_facts(device):
    if device.type == "xpu":
        from .xpu import OPTIONS

        threads = 8 * torch.xpu.get_device_properties(device).gpu_eu_count  # 8 an execution unit, 7 on Iris Xe
        return DeviceFacts(threads=threads, sum_options=OPTIONS, locate_options=OPTIONS, exact={**OPTIONS, **EXACT})
    if device.type == "cpu":
        return DeviceFacts()
    facts = {"exact": EXACT, "threads": 32 * torch.cuda.get_device_properties(device).multi_processor_count}
    if torch.version.hip is not None:
        return DeviceFacts(**facts)
    overlapped = {}
    if torch.cuda.get_device_capability(device) >= (9, 0):
        from .overlap import release, wait  # programmatic dependent launch, from Hopper on

        facts.update(release=release, wait=wait)
        overlapped = {"launch_pdl": True}
    facts.update(keeps=keeps_launches(device), locate_options=overlapped)
    facts["sum_options"] = {"maxnreg": 32, **overlapped}  # what a thread has of a full processor
    facts["weigh_options"] = {"maxnreg": 64, **overlapped}  # and where programs are one warp, of which it takes 32
    return DeviceFacts(**facts)


EXACT = {"enable_fp_fusion": False}


def on_device(device):
    """Launches go to the current device, so make the tensors' device current where it is not."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or module.current_device() == device.index:
        return contextlib.nullcontext()
    return module.device(device)
