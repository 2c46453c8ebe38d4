"""Compile every kernel that launch can launch, for a GPU that is not here: python tests/compile_only.py TARGET.

Prints one JSON line a compiled kernel: its name, how often its assembly has what must not be there, and, for NVIDIA, whether it
is called as gpu/handles.py knows.
"""

import dataclasses
import itertools
import json
import math
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

import spec_verify_xpu as sv
from batches import random_batch
from spec_verify_xpu.gpu import config, handles, launch

TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), "ptx", {"fp64": r"\.f64", "atomics": r"\batom\.|\bred\."}),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "amdgcn", {"fp64": r"_f64", "atomics": r"_atomic_"}),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), "amdgcn", {"fp64": r"_f64", "atomics": r"_atomic_"}),
}


KERNELS = ("sum_chunks", "locate", "write_tokens", "weigh_blocks", "share_rows", "sum_residual", "draw")
KERNELS_OF_ENGINES = ("arrange",)


class NoDevice(DriverBase):
    """A driver for a target that is not here: Triton asks it what to compile for, and nothing else."""

    def __init__(self, target):
        self.target = target

    @classmethod
    def is_active(cls):
        return True

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError

    map_python_to_cpp_type = get_benchmarker


class CompileOnly:
    """Stands in for a kernel: kernel[grid](...) compiles for exactly these arguments, and launches nothing."""

    def __init__(self, kernel, compiled):
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        def compile(*args, **kwargs):
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))
            return self.compiled[-1]

        return compile


def note_calls(is_called_as_known, called):
    """is_called_as_known, which notes what it finds of each compiled kernel, and says no, since no driver is here."""

    def note(compiled, *arguments):
        called[compiled.hash] = is_called_as_known(compiled, *arguments)
        return False

    return note


def serve(batch):
    """Ragged and greedy sequences, seeds, emitted tokens, and scores of every dtype."""
    tokens, draft, target = batch.draft_tokens.flatten(), batch.draft_probs.flatten(0, 1), batch.target_probs.flatten(0, 1)
    ragged = tokens, draft, target, torch.tensor([0, 3, 6]), 3
    emitted = torch.empty(2, 4, dtype=torch.int32)
    greedy, bonus_tokens = torch.tensor([True, False]), torch.zeros(2, dtype=torch.int64)
    sv.verify_varlen(*ragged, seed=1, greedy=greedy, emitted=emitted, impl="triton")
    for rows, ids in ((draft, bonus_tokens), (draft[:, :127], bonus_tokens.int())):
        sv.verify_varlen(tokens, rows, rows, *ragged[3:], seed=1, greedy=greedy, bonus_tokens=ids, impl="triton")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        result = sv.verify_greedy(batch.draft_tokens, batch.target_probs.to(dtype), impl="triton")
    sv.sample(batch.target_probs, seed=1, impl="triton")
    sv.emit(batch.draft_tokens, *result, impl="triton")


def serve_logits(batch):
    """Logits with and without a draft, dense and ragged, temperatures or none, every dtype, aligned or not."""
    tokens, draft, target = batch.draft_tokens, batch.draft_probs, batch.target_probs
    temperature, ends = torch.ones(2), torch.tensor([0, 3, 6])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        draft, target = draft.to(dtype), target.to(dtype)
        sv.verify_logits(tokens, draft, target, *batch[3:5], temperature=temperature, impl="triton")
        sv.verify_logits(tokens, None, target, seed=1, greedy=torch.tensor([True, False]), impl="triton")
        sv.verify_logits(tokens, draft.bfloat16(), target.float(), seed=1, impl="triton")  # each its own dtype
    ragged = tokens.flatten(), draft.flatten(0, 1), target.flatten(0, 1), ends, 3
    emitted, bonus_tokens = torch.empty(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    sv.verify_logits_varlen(*ragged, seed=1, emitted=emitted, impl="triton")
    without_last_rows = *ragged[:2], ragged[1], ends, 3
    sv.verify_logits_varlen(*without_last_rows, seed=1, bonus_tokens=bonus_tokens, emitted=emitted, impl="triton")
    slots, own = torch.zeros(2, dtype=torch.int64), {"draft_temperature": temperature}
    sv.verify_logits(tokens, draft, target, seed=1, draft_slots=slots.int(), impl="triton")
    sv.verify_logits(tokens, draft.half(), target, seed=1, temperature=temperature.clone(), **own, impl="triton")
    sv.verify_logits_varlen(ragged[0], draft, *ragged[2:], seed=1, draft_slots=slots, **own, emitted=emitted, impl="triton")
    sv.sample_logits(target, seed=1, temperature=0.5, impl="triton")


def serve_vllm(compiled):
    """What its V2 runner brings, of two requests with three drafts."""
    from spec_verify_engines import vllm_v2_kernel  # which is not installed where Intel's tests run

    vllm_v2_kernel.arrange = CompileOnly(vllm_v2_kernel.arrange, compiled)
    tokens, states = (torch.zeros(n, dtype=torch.int32) for n in (8, 2))
    cu_num_logits = torch.tensor([0, 4, 8], dtype=torch.int32)
    vllm_v2_kernel.by_triton(tokens, cu_num_logits, tokens.long(), states, states.float(), states.long(), 3)


def compile_all(name):
    target, language, forbidden = TARGETS[name]
    triton.runtime.driver.set_active(NoDevice(target))
    compiled = []
    for kernel in KERNELS:
        setattr(launch, kernel, CompileOnly(getattr(launch, kernel), compiled))
    facts = {}
    if target.backend == "cuda":
        from spec_verify_xpu.gpu.overlap import release, wait

        options = {name: {"launch_pdl": True} for name in ("sum_options", "locate_options", "weigh_options")}
        options["sum_options"]["maxnreg"], options["weigh_options"]["maxnreg"] = 32, 64
        facts = {"keeps": True, "release": release, "wait": wait, **options}
        handles.is_called_as_known = note_calls(handles.is_called_as_known, called := {})
    facts = launch.DeviceFacts(**facts, exact=launch.EXACT)
    launch.device_facts = lambda device: facts
    names = ("CUDA", "CUDA_WIDE", "XPU", "XPU_FEW_ROWS")
    settings = [getattr(config, name) for name in names]
    for setting, V, one_hot in itertools.product(settings, (128, 129), (False, True)):
        config.CONFIGURATIONS["cpu"] = lambda *_, setting=setting: setting
        random_batch(2, 3, V, one_hot=one_hot).verify("triton")
    for dtype, uniform in itertools.product((torch.float16, torch.bfloat16), (torch.float32, torch.float64)):
        random_batch(2, 3, 128, dtype=dtype, uniform=uniform, tokens=torch.int32).verify("triton")
    serve(random_batch(2, 3, 128))
    for setting, V in itertools.product((*config.LOGITS["cuda"], *config.LOGITS["xpu"]), (128, 129)):
        config.LOGITS["cpu"] = (dataclasses.replace(setting, fills=math.inf),)
        serve_logits(random_batch(2, 3, V))
    serve_vllm(compiled)
    for kernel in {kernel.hash: kernel for kernel in compiled}.values():
        text = kernel.asm[language]
        counts = {name: len(re.findall(pattern, text)) for name, pattern in forbidden.items()}
        known = {"called_as_known": called[kernel.hash]} if target.backend == "cuda" else {}
        print(json.dumps({"kernel": kernel.metadata.name, **counts, **known}))


if __name__ == "__main__":
    compile_all(sys.argv[1])
