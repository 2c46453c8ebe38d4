"""The operators: schemas, fakes, and one registration for each device. Implementations are imported when first run.

Outputs are arguments that are written, so one operator serves callers who bring their own and callers who do not, and what
traces one traces the other.
"""

import functools
import importlib.util
from ctypes import c_float, c_int32
from typing import NamedTuple, Optional

import torch

from ._ops import add_op_namespace_prefix, ops

IMPLEMENTATIONS = ("auto", "triton", "numba", "eager", "reference")


class VerifyResult(NamedTuple):
    """accepted [B], how many drafts stand, in [0, K]; next_token [B], the token that follows them."""

    accepted: torch.Tensor
    next_token: torch.Tensor


class Call(NamedTuple):
    """What an implementation's `verify` gets, validated. B sequences of at most K = max_drafts drafts, R = K + 1 rows each.

    Without cu_drafts tensors are dense, [B, K, ..] and [B, R, ..]. With it they are ragged: T drafts, one sequence behind
    the other, [T, ..], and [T + B, ..] rows. Uniforms, or seed and offset, or neither: then every sequence is greedy.
    With bonus_tokens target_probs has rows of drafts alone. There is one or more: without drafts no implementation is called.
    With `logits` the rows are logits, and probabilities those that rule.probabilities makes of them. With draft_slots,
    which are of logits alone, draft_probs is [S, D, ..], ragged or not, and D is no less than the drafts of any sequence.
    """

    draft_tokens: torch.Tensor
    draft_probs: Optional[torch.Tensor]
    target_probs: torch.Tensor
    uniform_accept: Optional[torch.Tensor]
    uniform_sample: Optional[torch.Tensor]
    seed: Optional[torch.Tensor]  # [B], as offset
    offset: Optional[torch.Tensor]
    purpose: int  # what seeds draw the next token for: rule.SAMPLE, or rule.DRAW
    lengths: Optional[torch.Tensor]
    cu_drafts: Optional[torch.Tensor]
    max_drafts: int
    greedy: Optional[torch.Tensor]
    bonus_tokens: Optional[torch.Tensor]  # [B], what follows where all drafts stand
    logits: bool
    temperature: Optional[torch.Tensor]  # [B] float32, for logits alone
    one_temperature: float  # for all sequences where there is no tensor
    draft_slots: Optional[torch.Tensor]  # [B], of draft_probs, clamped to [0, S - 1]
    draft_temperature: Optional[torch.Tensor]  # [B] float32, where it is not that of the target
    num_emitted: Optional[torch.Tensor]  # [B], to be written, as the three below
    emitted: Optional[torch.Tensor]  # [B, R]
    accepted: torch.Tensor
    next_token: torch.Tensor

    @property
    def all_greedy(self):
        return self.uniform_accept is None and self.seed is None

    @property
    def temperature_fields(self):
        """Those of one_temperature as a float32: an int."""
        return c_int32.from_buffer(c_float(self.one_temperature)).value

    def tensors(self):
        """{name: tensor or None}"""
        return {name: x for name, x in zip(self._fields, self) if x is None or isinstance(x, torch.Tensor)}


_library = torch.library.Library(ops.name, "FRAGMENT")
_library.define(
    "verify(Tensor draft_tokens, Tensor? draft_probs, Tensor target_probs, Tensor? uniform_accept, Tensor? uniform_sample,"
    " Tensor? seed, Tensor? offset, int purpose, Tensor? lengths, Tensor? cu_drafts, SymInt max_drafts, Tensor? greedy,"
    " Tensor? bonus_tokens, bool logits, Tensor? temperature, float one_temperature, Tensor? draft_slots,"
    " Tensor? draft_temperature, Tensor(a!)? num_emitted, Tensor(b!)? emitted, Tensor(c!) accepted, Tensor(d!) next_token,"
    " str impl) -> ()"
)
_library.define("emit(Tensor draft_tokens, Tensor accepted, Tensor next_token, SymInt pad, Tensor(a!) emitted, str impl) -> ()")


def run_verify(draft_tokens, draft_probs, target_probs, *rest):
    *rest, impl = rest
    call = Call(draft_tokens, rows(draft_probs), rows(target_probs), *rest)
    module = implementation(target_probs.device.type, impl)
    if call.bonus_tokens is not None and draft_tokens.numel() == 0:
        write_bonus_tokens(call)
    else:
        module.verify(call)
    torch.autograd.graph.increment_version([x for x in call[-4:] if x is not None])  # they were written behind torch's back


@torch.inference_mode()  # as eager
def write_bonus_tokens(call):
    """What sequences without drafts get. There is no row that a kernel could be pointed at."""
    call.accepted.zero_()
    call.next_token.copy_(call.bonus_tokens)
    if call.num_emitted is not None:
        call.num_emitted.fill_(1)
    if call.emitted is not None:
        call.emitted.fill_(-1)[:, 0] = call.bonus_tokens


def run_emit(draft_tokens, accepted, next_token, pad, emitted, impl):
    implementation(emitted.device.type, impl).emit(draft_tokens, accepted, next_token, pad, emitted)
    torch.autograd.graph.increment_version(emitted)


def rows(probs):
    """With contiguous rows, as validated; a tensor that torch materialised on the way here may have lost them."""
    return probs if probs is None or probs.stride(-1) == 1 or probs.shape[-1] == 1 else probs.contiguous()


for name, run in (("verify", run_verify), ("emit", run_emit)):
    for key in ("CPU", "CUDA", "XPU"):  # torch's ROCm builds dispatch under CUDA
        _library.impl(name, run, key)
    torch.library.register_fake(add_op_namespace_prefix(name), lambda *arguments: None)


def require_implementation(impl):
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


@functools.lru_cache(None)
def implementation(device_type, impl):
    """The module that runs on this type of device. An implementation asked for by name is that one or an error."""
    require_implementation(impl)
    if impl == "auto":
        impl = "numba" if device_type == "cpu" else "triton"
        try:
            return implementation(device_type, impl)
        except ValueError:  # not installed, or not for this device
            return implementation(device_type, "eager")
    if impl == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ValueError('impl: expected Triton to be installed for "triton", got none')
        from .gpu import launch

        launch.require_triton(device_type)
        return launch
    if impl == "numba":
        if device_type != "cpu":
            raise ValueError(f'impl: "numba" runs on cpu tensors, got {device_type} tensors')
        try:
            from . import compiled_cpu
        except ImportError as error:  # Numba says so of a NumPy that is too new for it, too
            raise ValueError(f'impl: expected Numba to be installed for "numba", got: {error}') from error

        return compiled_cpu
    if impl == "eager":
        from . import eager

        return eager
    from . import reference

    return reference
