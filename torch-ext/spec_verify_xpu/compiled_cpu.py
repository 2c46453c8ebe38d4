"""The rule for the CPU, compiled by Numba: one pass over the rejected row pair of each sequence, at the speed of memory.

Tensors go in as addresses, strides and numbers for dtypes, so one compiled signature serves every call. Large batches are
split over plain threads, not by Numba's own parallel loops: the layer that runs those may crash when two threads call at
once, or survive no fork.
"""

import contextlib
import functools
import os
import queue
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import fixed_point
from .rule import UNIFORM_RANGE

BLOCK = 512  # entries of a row that are summed before they are searched; the sums of their limbs fit 32 bits
GRAIN = 2**17  # entries of row pairs that are worth a thread: some 100 us of work, and 10 us to hand it over

LIMB, ZERO, ONE = np.float32(2**22), np.float32(0), np.float32(1)
BITS, UNIFORM_SCALE = UNIFORM_RANGE - 1, float(UNIFORM_RANGE)

# Typed numbers: a literal would be part of a tuple's type, and compile functions once more.
FLOAT32, FLOAT16, BFLOAT16, FLOAT64, INT32, INT64, ONE_HOT, NOTHING = np.arange(8)
DTYPES = {
    torch.float32: int(FLOAT32),
    torch.float16: int(FLOAT16),
    torch.bfloat16: int(BFLOAT16),
    torch.float64: int(FLOAT64),
    torch.int32: int(INT32),
    torch.int64: int(INT64),
}

scale = njit(fixed_point.scale)


@intrinsic
def pointer(typing_context, address):
    """An address as `carray` takes it."""

    def cast(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), cast


@njit
def load_int(address, dtype):
    if dtype == INT32:
        return np.int64(carray(pointer(address), 1, np.int32)[0])
    return carray(pointer(address), 1, np.int64)[0]


@njit
def load_bits(address, dtype):
    """A uniform as 63 bits."""
    if dtype == INT64:
        return carray(pointer(address), 1, np.int64)[0] & BITS
    if dtype == FLOAT32:
        u, largest = np.float64(carray(pointer(address), 1, np.float32)[0]), 1 - 2.0**-24
    else:
        u, largest = carray(pointer(address), 1, np.float64)[0], 1 - 2.0**-53
    return np.int64(min(u, largest) * UNIFORM_SCALE) if u > 0 else 0


@njit
def widen_float16(half):
    """float16 by its bits, NaN and negatives as 0. No float32 in it is subnormal, so flushing those changes nothing."""
    if half > 0x7C00:
        return ZERO
    if half < 0x400:
        return np.float32(half) * np.float32(2**-24)
    return np.uint32((half << 13) + (112 << 23)).view(np.float32)


@njit
def load_block(row, start, stop, buffer):
    """Entries [start, stop) of a row as float32, in place or widened into the buffer; no entries where all are 0."""
    address, dtype = row
    n = max(stop - start, 0)
    if dtype == FLOAT32:
        return carray(pointer(address + 4 * start), n, np.float32)
    if dtype == NOTHING or (dtype == ONE_HOT and not start <= address < stop):
        n = 0
    block = carray(pointer(buffer), n, np.float32)
    halves = carray(pointer(address + 2 * start), n, np.uint16)
    if dtype == BFLOAT16:
        for i in range(n):
            block[i] = np.uint32(halves[i] << 16).view(np.float32)
    elif dtype == FLOAT16:
        for i in range(n):
            block[i] = widen_float16(halves[i])
    elif n > 0:  # ONE_HOT, whose address is the token
        block[:] = ZERO
        block[address - start] = ONE
    return block


@njit
def limbs(x):
    """fixed(x) = high * 2**22 + low for x in [0, 1], in float32 and int32 operations, of which every CPU has vectors."""
    x = x * LIMB
    high = np.int32(x)
    return high, np.int32((x - np.float32(high)) * LIMB)


@njit
def weight(p, q):
    """max(0, fixed(p) - fixed(q)) in limbs: fixed is monotone, so that is fixed(p) - fixed(min(p, q))."""
    p = p if p > ZERO else ZERO  # NaN too
    p = p if p < ONE else ONE
    q = q if q > ZERO else ZERO
    q = q if q < p else p
    p_high, p_low = limbs(p)
    q_high, q_low = limbs(q)
    return np.int32(p_high - q_high), np.int32(p_low - q_low)


@njit
def join(high, low):
    return (np.int64(np.uint32(high)) << 22) + low  # 512 entries of 1 reach 2**31


@njit
def fixed_at(row, i, buffer):
    return join(*weight(load_block(row, i, i + 1, buffer)[0], ZERO))


@njit
def load_pair(target, draft, start, V, shared, buffers):
    """The block at start of both rows. The draft's may be shorter: it is 0 past the `shared` entries."""
    p = load_block(target, start, min(start + BLOCK, V), buffers[0])
    q = load_block(draft, start, min(start + BLOCK, shared), buffers[1])
    return p, q


@njit
def mass(p, q):
    """The sum of a block's weights. The casts keep it in 32 bits, twice the lanes of 64."""
    high = low = np.int32(0)
    for i in range(len(q)):
        more_high, more_low = weight(p[i], q[i])
        high, low = np.int32(high + more_high), np.int32(low + more_low)
    for i in range(len(q), len(p)):
        more_high, more_low = weight(p[i], ZERO)
        high, low = np.int32(high + more_high), np.int32(low + more_low)
    return join(high, low)


@njit
def sum_blocks(target, draft, V, shared, sums, buffers):
    """Write the mass of each block, and return that of the row."""
    total = 0
    for block in range(len(sums)):
        p, q = load_pair(target, draft, block * BLOCK, V, shared, buffers)
        sums[block] = mass(p, q)
        total += sums[block]
    return total


@njit
def search(target, draft, V, shared, sums, threshold, buffers):
    """The first entry at which the running sum of weights passes the threshold."""
    block = 0
    while sums[block] <= threshold:
        threshold -= sums[block]
        block += 1
    p, q = load_pair(target, draft, block * BLOCK, V, shared, buffers)
    for i in range(len(p)):
        threshold -= join(*weight(p[i], q[i] if i < len(q) else ZERO))
        if threshold < 0:
            break
    return block * BLOCK + i


@njit
def at(tensor, b, i):
    address, dtype, stride_b, stride_i = tensor
    return address + b * stride_b + i * stride_i, dtype


@njit(nogil=True)
def verify_sequences(first, last, K, V_draft, V, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample,
                     lengths, accepted, next_token):  # fmt: skip
    """Verify sequences [first, last). A tensor is (address, dtype, stride_b, stride_i), strides in bytes."""
    sums = np.empty((V + BLOCK - 1) // BLOCK, np.int64)
    memory = np.empty(2 * BLOCK, np.float32)
    buffers = memory.ctypes.data, memory[BLOCK:].ctypes.data
    shared = min(V, V_draft)
    nothing = (np.int64(0), NOTHING)
    for b in range(first, last):
        length = K if lengths[1] == NOTHING else min(load_int(*at(lengths, b, 0)), K)
        n, draft = 0, nothing
        while n < length:
            token = load_int(*at(draft_tokens, b, n))
            if not 0 <= token < V_draft:
                break
            row = (token, ONE_HOT) if draft_probs[1] == ONE_HOT else at(draft_probs, b, n)
            q = fixed_at(row, token, buffers[1])
            p = fixed_at(at(target_probs, b, n), token, buffers[0]) if token < V else 0
            if scale(load_bits(*at(uniform_accept, b, n)), q) >= p:
                draft = row
                break
            n += 1
        target = at(target_probs, b, n)
        total = sum_blocks(target, draft, V, shared, sums, buffers)
        if total == 0 and draft[1] != NOTHING:
            draft = nothing
            total = sum_blocks(target, draft, V, shared, sums, buffers)
        threshold = scale(load_bits(*at(uniform_sample, b, n)), total)
        carray(pointer(accepted), last, np.int64)[b] = n
        token = search(target, draft, V, shared, sums, threshold, buffers) if total > 0 else 0
        carray(pointer(next_token), last, np.int64)[b] = token


with contextlib.suppress(RuntimeError):  # no directory to write to: then each process compiles
    verify_sequences.enable_caching()


def describe(x, absent=NOTHING):
    """A tensor as the kernel takes it, or what stands for None."""
    if x is None:
        return 0, int(absent), 0, 0
    size, strides = x.itemsize, x.stride()
    return x.data_ptr(), DTYPES[x.dtype], strides[0] * size, strides[1] * size if len(strides) > 1 else 0


@functools.lru_cache(None)
def helper(process, i):
    """Helper thread i. The process is part of the key because threads do not survive a fork.

    The executor joins it when the interpreter ends: a thread that is then still letting go of tensors would end the process.
    """
    return ThreadPoolExecutor(1, f"spec_verify_xpu {i}")


def work(shares, done, arguments, tensors):
    """Do shares until none is left. The tensors are held because their memory must outlive a caller who is interrupted."""
    with contextlib.suppress(queue.Empty):
        while True:
            share = shares.get_nowait()
            try:
                done.put(verify_sequences(*share, *arguments))
            except BaseException as error:  # the caller's to raise, whichever thread it came in
                done.put(error)


def verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths):
    """Arguments as in `api.verify`, validated, uniforms given. Returns accepted [B] and next_token [B], int64."""
    (B, K), V = draft_tokens.shape, target_probs.shape[2]
    accepted, next_token = (target_probs.new_empty(B, dtype=torch.int64) for _ in range(2))
    tensors = draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths, accepted, next_token
    arguments = (
        K, V if draft_probs is None else draft_probs.shape[2], V,
        describe(draft_tokens), describe(draft_probs, ONE_HOT), describe(target_probs),
        describe(uniform_accept), describe(uniform_sample), describe(lengths, NOTHING),
        accepted.data_ptr(), next_token.data_ptr(),
    )  # fmt: skip

    # Whoever is free takes the next share, so no call waits for a helper that is late or busy with another call.
    count = max(1, min(B, B * V // GRAIN))
    shares, done = queue.SimpleQueue(), queue.SimpleQueue()
    for i in range(count):
        shares.put((B * i // count, B * (i + 1) // count))
    for i in range(1, min(count, torch.get_num_threads())):
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and the caller works alone
            helper(os.getpid(), i).submit(work, shares, done, arguments, tensors)
    work(shares, done, arguments, tensors)
    for _ in range(count):
        error = done.get()  # None where all went well
        if error is not None:
            raise error
    return accepted, next_token


def warmup():
    """Compile, or load what an earlier process compiled, and return the seconds it took. No later call compiles."""
    start = time.perf_counter()
    ints, ones = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1)
    verify(ints[:, :0], None, ones, ints[:, :0], ints, None)
    return time.perf_counter() - start
