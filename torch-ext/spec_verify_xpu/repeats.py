"""Calls of a layout that was seen before: not validated, planned or sent through torch's dispatcher again, only launched.

That is most of the host's time. torch's guards, by which its compiler knows tensors again, and its allocator's entries are
private to torch, and how kernels are launched to Triton (gpu/handles.py). Where one of them is missing, and on other devices
than NVIDIA's, every call goes the whole way.
"""

from operator import is_, itemgetter

import torch

from .ops import VerifyResult, implementation

try:
    from torch._C._dynamo.guards import TensorGuards
    from torch._C._dynamo.guards import _empty_strided_cuda as empty  # type: ignore[attr-defined]
    from torch._C._dynamo.guards import _reinterpret_tensor as part_of  # type: ignore[attr-defined]
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

MOST_KNOWN = 4096  # shapes
MOST_SHARED = 8192  # words of scratch that stay allocated for as long as the outputs of the same allocation live

known: dict = {}  # by target_probs.shape: functions of a call's arguments, each for calls of one layout


def repeat(arguments):
    """The result of a call of a known layout, else None. arguments are the tensors of ops.Call, in its order, and options."""
    target = arguments[2]
    if type(target) is torch.Tensor:  # not a subclass, which would want to see what is done with it
        for run in known.get(target.shape, ()):
            result = run(arguments)
            if result is not None:
                return result
    return None


def remember(arguments, call, impl):
    """Keep what is needed to repeat a call that has run."""
    given = arguments[: len(call.tensors())]
    is_plain = (
        TensorGuards is not None and call.target_probs.is_cuda and all(x is None or type(x) is torch.Tensor for x in given)
    )
    if not is_plain or torch._C._len_torch_dispatch_stack():  # the last: something wants to see what is dispatched
        return
    if not all(map(is_, given[:-2], call.tensors().values())):  # randomness was drawn in the call
        return
    module = implementation("cuda", impl)
    kept = module.kept(call) if hasattr(module, "kept") else None
    if kept:
        if len(known) >= MOST_KNOWN:
            known.clear()
        runs = known.setdefault(call.target_probs.shape, [])
        runs[:] = [repeater(arguments, call, *kept), *runs[:7]]


def repeater(arguments, call, words, greedy_words, is_aligned, kept):
    """What repeats a call with tensors of these layouts and equal options, and returns None for any other call.

    From words on it takes what gpu/launch.py has kept of the call.
    """
    import triton

    result_of = tuple.__new__  # past the named tuple's own, which takes longer
    take = itemgetter(*[i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)])
    others = itemgetter(*[i for i, x in enumerate(arguments) if not isinstance(x, torch.Tensor)])
    same = others(arguments)
    is_laid_out_alike = TensorGuards(*take(arguments), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    current_device, current_stream, hooks = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, triton.knobs.runtime
    address_of = torch.Tensor.data_ptr
    device_index, B, dtype = call.accepted.device.index, len(call.accepted), call.accepted.dtype
    draft, target = (1, 2) if call.draft_probs is not None else (1, 1)
    brings_out = take(arguments)[-1] is call.next_token
    written = slice(-2 * brings_out - (call.emitted is not None), None)
    in_one = not brings_out and dtype == torch.int64 and words + greedy_words <= MOST_SHARED
    lock, write, ((first, launch_first), (second, launch_second)) = kept.lock, kept.write, kept.launches

    def run(arguments):
        if others(arguments) != same:
            return None
        given = take(arguments)
        if not is_laid_out_alike(*given) or current_device() != device_index or hooks.launch_enter_hook.calls:
            return None
        addresses = [*map(address_of, given)]
        if is_aligned and (addresses[draft] | addresses[target]) % 16:
            return None
        if in_one:  # an allocation costs as much as two parts of one
            scratch = empty((2 * B + words + greedy_words,), (1,), torch.int64)
            accepted, next_token = part_of(scratch, (B,), (1,), 0), part_of(scratch, (B,), (1,), B)
            at = scratch.data_ptr()
            addresses += at, at + 8 * B, at + 16 * B, at + 16 * B + 8 * words
        else:
            if brings_out:
                accepted, next_token = given[-2:]
            else:
                accepted, next_token = empty((B,), (1,), dtype), empty((B,), (1,), dtype)
                addresses += accepted.data_ptr(), next_token.data_ptr()
            scratch = empty((words + greedy_words,), (1,), torch.int64)
            at = scratch.data_ptr()
            addresses += at, at + 8 * words
        with lock:
            write(*addresses)
            first.stream = second.stream = current_stream(device_index)
            error = launch_first() or launch_second()
        if error:
            kept.run(addresses)  # which knows what to do
        if written.start:
            torch._C._increment_version(given[written])  # they were written behind torch's back
        return result_of(VerifyResult, (accepted, next_token))

    return run
