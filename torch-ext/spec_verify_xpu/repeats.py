"""Calls of a layout that was seen before: not validated, planned or sent through torch's dispatcher again, only launched.

That is most of the host's time. torch's guards, by which its compiler knows tensors again, and its allocator's entries are
private to torch, and how kernels are launched to Triton (gpu/handles.py). Where one of them is missing, and where neither
Numba runs nor a kernel on NVIDIA, every call goes the whole way.
"""

from operator import is_, itemgetter

import torch
from torch.compiler import is_compiling

from .ops import VerifyResult, implementation

try:
    from torch._C._dynamo.guards import TensorGuards, _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]
    from torch._C._dynamo.guards import _reinterpret_tensor as part_of  # type: ignore[attr-defined]

    EMPTY = {"cuda": _empty_strided_cuda, "cpu": _empty_strided_cpu}  # on devices where launches are kept
except ImportError:
    EMPTY = {}

MOST_KNOWN = 4096  # shapes, with at most 8 layouts each
MOST_SHARED = 2**18  # words of scratch that stay allocated for as long as the outputs of the same allocation live

known: dict = {}  # by target_probs.shape: functions of a call's arguments, each for calls of one layout


def repeat(arguments):
    """The result of a call of a known layout, else None.

    arguments are the tensors of ops.Call, in its order, then dtype, impl, max_drafts, logits and one_temperature.
    """
    target = arguments[2]
    # Subclasses and modes want to see what is dispatched.
    if type(target) is torch.Tensor and not is_compiling() and not torch._C._len_torch_dispatch_stack():
        for run in known.get(target.shape, ()):
            result = run(arguments)
            if result is not None:
                return result
    return None


def remember(arguments, call, impl):
    """Keep what is needed to repeat a call that has run."""
    tensors, device = arguments[:-5], call.accepted.device
    module = implementation(device.type, impl) if device.type in EMPTY else None
    if not hasattr(module, "kept") or not all(x is None or is_its_memory(x) for x in tensors):
        return
    is_watched = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack()
    is_current = device.type == "cpu" or torch._C._cuda_getDevice() == device.index
    drew = not all(map(is_, tensors[:-2], call.tensors().values()))  # randomness, in the call
    kept = None if is_watched or drew or not is_current else module.kept(call)
    if kept:
        run = repeater(arguments, call, *kept)
        if run:
            if len(known) >= MOST_KNOWN:
                known.clear()
            runs = known.setdefault(call.target_probs.shape, [])
            runs[:] = [run, *runs[:7]]


def is_its_memory(x):
    """Whether a tensor is what its memory holds. Where it is not, torch's dispatcher makes another one of it."""
    return type(x) is torch.Tensor and not x.is_neg() and not x._is_zerotensor()


def repeater(arguments, call, words, greedy_words, was_aligned, launch):
    """What repeats a call with tensors of these layouts and equal options, and returns None for any other call.

    From words on it takes what the implementation has kept of the call. None if not even this call would be repeated.
    """
    device, empty = call.accepted.device, EMPTY[call.accepted.device.type]
    if device.type == "cpu":  # which is always the current device, None, and has no hooks
        current_device = is_hooked = lambda: None
    else:
        from .gpu.handles import is_hooked

        current_device = torch._C._cuda_getDevice
    *tensors, dtype, _, max_drafts, _, _ = arguments
    options = arguments[-5:]
    take = itemgetter(*[i for i, x in enumerate(tensors) if x is not None])
    absent = itemgetter(*[i for i, x in enumerate(tensors) if x is None])
    is_laid_out_alike = TensorGuards(*take(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if not is_laid_out_alike(*take(tensors)):  # one tensor given as two arguments
        return None
    result_of = tuple.__new__  # past the named tuple's own, which takes longer
    address_of = torch.Tensor.data_ptr
    device_index, B, result_dtype = device.index, len(call.accepted), call.accepted.dtype
    draft, target = (1, 2) if call.draft_probs is not None else (1, 1)
    brings_out = tensors[-1] is not None
    written = slice(-2 * brings_out - sum(x is not None for x in (call.emitted, call.num_emitted)), None)
    in_one = not brings_out and result_dtype == torch.int64 and 0 < words + greedy_words <= MOST_SHARED
    half = B + B % 2  # so that both outputs and scratch begin at 16 bytes
    whole, part, own, step, int64 = (2 * half + words + greedy_words,), (B,), (words + greedy_words,), (1,), torch.int64
    to_next_token, to_scratch, to_greedy, greedy_offset = 8 * half, 16 * half, 16 * half + 8 * words, 8 * words

    def run(arguments):
        for x in absent(arguments):
            if x is not None:
                return None
        if type(arguments[-3]) is not type(max_drafts):
            return None
        given = take(arguments)
        if arguments[-5:] != options or not is_laid_out_alike(*given):
            return None
        if current_device() != device_index or is_hooked():
            return None
        addresses = [*map(address_of, given)]
        if was_aligned is not None and ((addresses[draft] | addresses[target]) % 16 == 0) is not was_aligned:
            return None
        if in_one:  # an allocation costs as much as two parts of one
            scratch = empty(whole, step, int64)
            accepted, next_token = part_of(scratch, part, step, 0), part_of(scratch, part, step, half)
            at = scratch.data_ptr()
            addresses += at, at + to_next_token, at + to_scratch, at + to_greedy
        else:
            if brings_out:
                accepted, next_token = given[-2:]
            else:
                accepted, next_token = empty(part, step, dtype), empty(part, step, dtype)
                addresses += accepted.data_ptr(), next_token.data_ptr()
            scratch = empty(own, step, int64)
            at = scratch.data_ptr()
            addresses += at, at + greedy_offset
        launch(addresses)
        if written.start:
            torch._C._increment_version(given[written])  # they were written behind torch's back
        return result_of(VerifyResult, (accepted, next_token))

    return run
