"""The rule for the CPU, compiled by Numba: one pass over the rejected row pair of each sequence, at the speed of memory.

Of logits each row is read once, up to the one that ends the draft; of that one pair the weights are gone through again.

Tensors go in as addresses, numbers for dtypes, and strides, so one compiled signature serves every call. Large batches are
split over plain threads, not by Numba's own parallel loops: the layer that runs those may crash when two threads call at
once, or survive no fork.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import queue
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from . import fixed_point, rule
from .fixed_point import scale
from .rule import ACCEPT, LOW_63, UNIFORM_RANGE, philox, random_bits

BLOCK = 512  # entries of a row that are summed before they are searched; the sums of their limbs fit 32 bits
# Entries of row pairs that are worth a thread: some 60 us of work, and 10 us to hand it over. A row of which only the argmax
# is wanted takes a fifth of a pair's time, so the few rows of a greedy sequence count as one pair.
GRAIN = 2**17
LOGITS_COST = 4  # how many pairs' time an entry of a sequence of logits takes at least

LIMB, ZERO, ONE = np.float32(2**22), np.float32(0), np.float32(1)
UNIFORM_SCALE = float(UNIFORM_RANGE)

# Of logits: typed numbers, since a literal is a float64 and would make one of what it meets.
INFINITY, LOWEST = np.int32(0x7F800000), np.int32(-(2**31))  # see fixed_point.order
LARGEST = np.finfo(np.float32).max
LOG2E, SMALLEST_POWER, WHOLE, ALMOST_HALF, UNITS, COLDEST, HOTTEST = map(
    np.float32,
    (rule.LOG2E, rule.SMALLEST_POWER, fixed_point.WHOLE, rule.ALMOST_HALF, 2**14, 2.0**-60, 2.0**60),
)
C0, C1, C2, C3, C4 = map(np.float32, rule.COEFFICIENTS)

DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool
# Typed numbers: a literal would be part of a tuple's type, and compile functions once more. The last three stand where
# others have a tensor's dtype, and make a number of the address: itself, the token of a one-hot row, a seed.
FLOAT32, FLOAT16, BFLOAT16, FLOAT64, INT32, INT64, BOOL, NUMBER, ONE_HOT, SEED = np.arange(10)
NUMBER_OF = {dtype: i for i, dtype in enumerate(DTYPES)}

# Which of (0, stride 0, stride 1) step over sequences and over positions.
DENSE, RAGGED_DRAFTS, RAGGED_ROWS, ONE_EACH = (1, 2), (0, 1), (1, 1), (1, 0)

NOTHING = np.int64(-1), ONE_HOT  # a row of zeros

for function in (scale, philox, random_bits):  # of plain integers, and right where 64 bits wrap
    register_jitable(function)


@intrinsic
def pointer(typing_context, address):
    """An address as `carray` takes it."""

    def cast(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), cast


@njit
def load_int(item):
    address, dtype = item
    if dtype == INT64:
        return carray(pointer(address), 1, np.int64)[0]
    if dtype == INT32:
        return np.int64(carray(pointer(address), 1, np.int32)[0])
    if dtype == BOOL:
        return np.int64(carray(pointer(address), 1, np.uint8)[0])
    return address  # NUMBER


@njit
def store_int(value, item):
    address, dtype = item
    if dtype == INT32:
        carray(pointer(address), 1, np.int32)[0] = value
    else:
        carray(pointer(address), 1, np.int64)[0] = value


@njit
def load_bits(uniforms, i, purpose):
    """The uniform of position i as 63 bits."""
    if uniforms[1] == SEED:
        seed, _, offset = uniforms
        return random_bits(seed, offset, i, purpose)
    address, dtype = at(uniforms, i)
    if dtype == INT64:
        return carray(pointer(address), 1, np.int64)[0] & LOW_63
    if dtype == FLOAT32:
        u, largest = np.float64(carray(pointer(address), 1, np.float32)[0]), 1 - 2.0**-24
    else:
        u, largest = carray(pointer(address), 1, np.float64)[0], 1 - 2.0**-53
    return np.int64(min(u, largest) * UNIFORM_SCALE) if u > 0 else 0


@njit
def widen_float16(half):
    """float16 by its bits. No float32 in it is subnormal, so flushing those changes nothing."""
    size = half & 0x7FFF
    if size < 0x400:
        x = np.float32(size) * np.float32(2**-24)
    else:
        x = np.uint32((size << 13) + ((112 if size < 0x7C00 else 224) << 23)).view(np.float32)
    return -x if half > 0x7FFF else x


@njit
def load_block(row, start, stop, buffer):
    """Entries [start, stop) of a row as float32, in place or widened into the buffer; no entries where all are 0."""
    address, dtype = row
    n = max(stop - start, 0)
    if dtype == FLOAT32:
        return carray(pointer(address + 4 * start), n, np.float32)
    if dtype == ONE_HOT and not start <= address < stop:
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
    """fixed(p) = high * 2**22 + low for x = p * LIMB, in float32 and int32 operations, of which every CPU has vectors."""
    high = np.int32(x)
    return high, np.int32((x - np.float32(high)) * LIMB)


@njit
def weight(p, q):
    """max(0, fixed(p) - fixed(q)) in limbs: fixed is monotone, so that is fixed(p) - fixed(min(p, q))."""
    p = (p if p > ZERO else ZERO) * LIMB  # NaN is 0 too. The product keeps both comparisons what they are: max and min
    p = p if p < LIMB else LIMB
    q = (q if q > ZERO else ZERO) * LIMB
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
    for i in range(np.uint64(len(q)), np.uint64(len(p))):  # of signed ones Numba lets some be negative, and gathers
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
def verify_sequence(length, tokens, draft, target, accept, sample, bonus, purpose, V_draft, V, sums, buffers):
    """rule.verify_sequence of the first `length` drafts."""
    n, rejected = 0, NOTHING
    while n < length:
        token = load_int(at(tokens, n))
        if not 0 <= token < V_draft:
            break
        row = (token, ONE_HOT) if draft[1] == NUMBER else at(draft, n)
        q = fixed_at(row, token, buffers[1])
        p = fixed_at(at(target, n), token, buffers[0]) if token < V else 0
        if scale(load_bits(accept, n, ACCEPT), q) >= p:
            rejected = row
            break
        n += 1
    if n == length and bonus[1] != NUMBER:
        return n, load_int(bonus)
    row, shared = at(target, n), min(V, V_draft)
    total = sum_blocks(row, rejected, V, shared, sums, buffers)
    if total == 0 and rejected != NOTHING:
        rejected = NOTHING
        total = sum_blocks(row, rejected, V, shared, sums, buffers)
    threshold = scale(load_bits(sample, n, purpose), total)
    return n, search(row, rejected, V, shared, sums, threshold, buffers) if total > 0 else 0


@njit
def order(field, infinity, lowest):
    """The bits of a float as an integer of their type: see fixed_point.order."""
    integer = type(field)
    signed = integer(field if field >= 0 else lowest - field)
    return signed if -infinity <= signed <= infinity else lowest


@njit
def largest(fields, infinity, lowest):
    best = lowest
    for i in range(len(fields)):
        best = max(best, order(fields[i], infinity, lowest))
    return best


@njit
def first_largest(fields, infinity, lowest):
    """Where the first of a row's largest floats is, given by their bits: found among those of its block, once that is known."""
    best, start = lowest, 0
    for i in range(0, len(fields), BLOCK):
        best_here = largest(fields[i : i + BLOCK], infinity, lowest)
        if best_here > best:
            best, start = best_here, i
    while order(fields[start], infinity, lowest) != best:
        start += 1
    return start


@njit
def argmax(row, V):
    """rule.argmax, by integers: a subnormal is not 0, even where the processor takes it for that."""
    address, dtype = row
    if dtype == FLOAT32:
        return first_largest(carray(pointer(address), V, np.int32), np.int32(0x7F800000), np.int32(-(2**31)))
    if dtype == FLOAT64:
        return first_largest(carray(pointer(address), V, np.int64), np.int64(0x7FF << 52), np.int64(-(2**63)))
    infinity = np.int16(0x7C00) if dtype == FLOAT16 else np.int16(0x7F80)
    return first_largest(carray(pointer(address), V, np.int16), infinity, np.int16(-(2**15)))


@njit
def verify_sequence_greedy(length, tokens, target, bonus, V):
    """rule.verify_sequence_greedy of the first `length` drafts."""
    for n in range(length):
        best = argmax(at(target, n), V)
        if load_int(at(tokens, n)) != best:
            return n, best
    return length, argmax(at(target, length), V) if bonus[1] == NUMBER else load_int(bonus)


@njit
def maximum(block):
    """A block's largest logit, -inf where all are NaN."""
    best = max(largest(block.view(np.int32), INFINITY, LOWEST), -INFINITY)
    return np.int32(best if best >= 0 else LOWEST - best).view(np.float32)


@intrinsic
def fused(typing, a, b, c):
    """a * b + c, float32, rounded once."""
    return types.float32(types.float32, types.float32, types.float32), lambda _, builder, __, values: builder.fma(*values)


@njit
def power(x, maximum, factor):
    """rule.power of x below a maximum, which is no less than -LARGEST: p and n + WHOLE."""
    t = (ZERO if x == maximum else x - maximum) * factor
    t = t if t > SMALLEST_POWER else SMALLEST_POWER  # NaN too
    r = t + WHOLE
    g = t - (r - WHOLE) + ONE
    p = g + C0
    p = fused(p, g, C1)
    p = fused(p, g, C2)
    p = fused(p, g, C3)
    return fused(p, g, C4), r


@njit
def weigh(logits, maximum, factor, weights):
    """Write the weights of a block of logits, and return their sum."""
    total = np.int64(0)
    for i in range(len(logits)):
        p, r = power(logits[i], maximum, factor)
        fields = np.int32(np.float32(p).view(np.int32) + (np.float32(r).view(np.int32) << 23))  # of p * 2**(n + 22)
        weights[i] = np.uint32(np.int32(fields).view(np.float32) + ALMOST_HALF)
        total += np.int64(weights[i])
    return total


@njit
def bit_length(x):
    """See fixed_point.bit_length."""
    return max((np.float32(x & ~(x >> 1)).view(np.int32) >> 23) - 126, 0)


@njit
def weigh_row(row, V, factor, parts, maxima, buffer):
    """Write a row's parts: the weights of its logits, and each block's mass. A one-hot row has no weights."""
    (address, dtype), (weights, masses) = row, parts
    masses[:] = 0
    if dtype == ONE_HOT:
        masses[address // rule.BLOCK] = rule.ONE
        return
    best = -LARGEST
    for block in range((V + rule.BLOCK - 1) // rule.BLOCK):
        start, stop = block * rule.BLOCK, min((block + 1) * rule.BLOCK, V)
        logits = load_block(row, start, stop, buffer)
        maxima[block] = maximum(logits)
        best = max(best, maxima[block])
        masses[block] = weigh(logits, max(maxima[block], -LARGEST), factor, weights[start:stop])
    total = 0
    for block in range(len(masses)):
        if masses[block] > 0:
            p, r = power(maxima[block], best, factor)
            masses[block] = (masses[block] >> 3) * np.int64(p * UNITS) >> min(10 - np.int64(r - WHOLE), 63)
            total += masses[block]
    if total > 0:
        apportion_one(masses, total)


@njit
def apportion_one(masses, total):
    """rule.apportion of rule.ONE by the masses of blocks, in place. Their total is given."""
    first, rest, size = np.argmax(masses), rule.ONE, bit_length(total)
    quotient = (rule.ONE << 16) // ((total >> size - 31) + 1)
    for block in range(len(masses)):  # by scale, since the product would not fit: see fixed_point.scaled_product
        masses[block] = scale(masses[block] << 10, quotient << 68 - size)
        rest -= masses[block]
    masses[first] += rest


@njit
def apportion(mass, weights, shares):
    """rule.apportion of a mass by a block's weights, into shares."""
    total, largest = np.int64(0), weights[0]
    for i in range(len(weights)):
        total += np.int64(weights[i])
        largest = max(largest, weights[i])
    size, mass_size = bit_length(total), bit_length(mass)
    quotient = np.uint64((mass << 61 - mass_size) // ((total >> size - 31) + 1))
    shift = np.uint64(min(30 + size - mass_size, 63))
    rest = mass
    for i in range(len(weights)):
        shares[i] = np.int64(np.uint64(weights[i]) * quotient >> shift)
        rest -= shares[i]
    first = none = np.int32(len(weights))
    for i in range(len(weights)):  # to the end, for vectors of places have no break
        first = np.int32(min(first, np.int32(i) if weights[i] == largest else none))
    shares[first] += rest


@njit
def spread(row, V, parts, block, shares):
    """The integers of a block's entries, of which the buffer holds as many as a block has at most."""
    (address, dtype), (weights, masses) = row, parts
    shares[:] = 0
    if dtype == ONE_HOT:
        shares[address % rule.BLOCK] = masses[block]
    elif masses[block] > 0:
        apportion(masses[block], weights[block * rule.BLOCK : min((block + 1) * rule.BLOCK, V)], shares)
    return shares


@njit
def residual(target, draft, V, V_draft, block, memory):
    """rule.verify_sequence's weights of a block of weighed rows, where a draft was refused, and their sum."""
    target_parts, draft_parts, _, _, p, q = memory
    spread(target, V, target_parts, block, p)
    if draft == NOTHING:
        return p, target_parts[1][block]
    spread(draft, V_draft, draft_parts, block, q)
    total = 0
    for i in range(len(p)):
        p[i] = max(p[i] - q[i], 0)
        total += p[i]
    return p, total


@njit
def verify_sequence_logits(length, tokens, draft, target, accept, sample, bonus, purpose, V_draft, V, draft_factor, factor,
                           memory, buffer):  # fmt: skip
    """rule.verify_sequence of the first `length` drafts, of logits that are to be multiplied by a factor."""
    target_parts, draft_parts, sums, maxima, p, q = memory
    n, rejected = 0, NOTHING
    while True:
        if n == length and bonus[1] != NUMBER:
            return n, load_int(bonus)
        row = at(target, n)
        weigh_row(row, V, factor, target_parts, maxima, buffer)
        token = load_int(at(tokens, n)) if n < length else -1
        if not 0 <= token < V_draft:
            break
        drafted = (token, ONE_HOT) if draft[1] == NUMBER else at(draft, n)
        weigh_row(drafted, V_draft, draft_factor, draft_parts, maxima, buffer)
        block, i = token // rule.BLOCK, token % rule.BLOCK
        p_token = spread(row, V, target_parts, block, p)[i] if token < V else 0
        if scale(load_bits(accept, n, ACCEPT), spread(drafted, V_draft, draft_parts, block, q)[i]) >= p_token:
            rejected = drafted
            break
        n += 1

    masses, draft_masses = target_parts[1][: len(sums)], draft_parts[1]
    sums[:] = masses
    if rejected != NOTHING:
        for block in range(len(sums)):
            if masses[block] > 0 and draft_masses[block] > 0:
                sums[block] = residual(row, rejected, V, V_draft, block, memory)[1]
        if sums.sum() == 0:
            rejected = NOTHING
            sums[:] = masses
    total = sums.sum()
    if total == 0:
        return n, 0

    block, i, threshold = 0, 0, scale(load_bits(sample, n, purpose), total)
    while sums[block] <= threshold:
        threshold -= sums[block]
        block += 1
    weights, _ = residual(row, rejected, V, V_draft, block, memory)
    while weights[i] <= threshold:
        threshold -= weights[i]
        i += 1
    return n, block * rule.BLOCK + i


@njit
def logits_memory(V, V_draft):
    """What rows of logits are worked out in: weights and masses of both rows, sums, maxima, and a block of each."""
    blocks = (V + rule.BLOCK - 1) // rule.BLOCK
    most = max(blocks, (V_draft + rule.BLOCK - 1) // rule.BLOCK)
    target_parts = np.empty(V, np.uint32), np.empty(most, np.int64)
    draft_parts = np.empty(V_draft, np.uint32), np.empty(most, np.int64)
    p, q = np.empty(rule.BLOCK, np.int64), np.empty(rule.BLOCK, np.int64)
    return target_parts, draft_parts, np.empty(blocks, np.int64), np.empty(most, np.float32), p, q


@njit
def emit_sequence(tokens, accepted, next_token, pad, emitted, count):
    """rule.emit_sequence into `count` entries."""
    for i in range(count):
        token = load_int(at(tokens, i)) if i < accepted else next_token if i == accepted else pad
        store_int(token, at(emitted, i))


@njit
def at(tensor, i):
    """Position i of a sequence's tensor (address, dtype, stride), the stride in bytes: its address and dtype."""
    address, dtype, stride = tensor
    return address + i * stride, dtype


@njit
def of(tensor, b, first=0):
    """Sequence b's own of a batch's tensor (address, dtype, stride of sequences, of positions), from position `first` on."""
    address, dtype, stride_b, stride_i = tensor
    return address + b * stride_b + first * stride_i, dtype, stride_i


@njit
def number(tensor, b):
    return load_int(at(of(tensor, b), 0))


@njit
def temperature_fields(temperature, b):
    """Those of sequence b's temperature, which tell a flushed subnormal from 0; where there is none, the number's own."""
    address, dtype = at(of(temperature, b), 0)
    return np.int32(address) if dtype == NUMBER else carray(pointer(address), 1, np.int32)[0]


@njit
def factor_of(fields):
    """What logits are multiplied by. A temperature that is not above 0, NaN too, counts as the coldest."""
    temperature = np.int32(fields).view(np.float32)
    return LOG2E / min(temperature if temperature > COLDEST else COLDEST, HOTTEST)


@njit
def span(lengths, cu_drafts, b, T, K):
    """Where sequence b's drafts start, and how many count."""
    if cu_drafts[1] == NUMBER:
        return 0, min(max(number(lengths, b), 0), K)
    start, end = min(max(number(cu_drafts, b), 0), T), min(max(number(cu_drafts, b + 1), 0), T)
    return start, min(max(end - start, 0), K)


def compiled(function):
    """Compile, and keep on disk. Numba looks for changes in this file alone, so the name carries the sources of the others."""
    sources = "".join(inspect.getsource(module) for module in (rule, fixed_point))
    function.__qualname__ += f"-{hashlib.sha256(sources.encode()).hexdigest()[:16]}"
    result = njit(nogil=True)(function)
    with contextlib.suppress(RuntimeError):  # no directory to write to: then each process compiles
        result.enable_caching()
    return result


@compiled
def verify_sequences(first, last, T, K, S, V_draft, V, purpose, logits, draft_tokens, draft_probs, target_probs,
                     uniform_accept, uniform_sample, seed, offset, lengths, cu_drafts, greedy, bonus_tokens,
                     temperature, draft_slots, draft_temperature, num_emitted, emitted, accepted, next_token):  # fmt: skip
    """Verify sequences [first, last)."""
    sums = np.empty((V + BLOCK - 1) // BLOCK, np.int64)
    memory = np.empty(rule.BLOCK, np.float32)  # a block of logits, or one of each row
    buffers = memory.ctypes.data, memory[BLOCK:].ctypes.data
    parts = logits_memory(V, V_draft) if logits else logits_memory(0, 0)
    for b in range(first, last):
        start, length = span(lengths, cu_drafts, b, T, K)
        tokens, target = of(draft_tokens, b, start), of(target_probs, b, start)
        fields, bonus = temperature_fields(temperature, b), at(of(bonus_tokens, b), 0)
        if number(greedy, b) or not 0 < fields <= INFINITY:
            n, token = verify_sequence_greedy(length, tokens, target, bonus, V)
        else:
            accept, sample = of(uniform_accept, b, start), of(uniform_sample, b, start)
            if seed[1] != NUMBER:
                accept = sample = number(seed, b), SEED, number(offset, b)
            if draft_slots[1] == NUMBER:
                draft = of(draft_probs, b, start)
            else:
                draft = of(draft_probs, min(max(number(draft_slots, b), 0), S - 1))
            if logits:
                draft_fields = fields if draft_temperature[1] == NUMBER else temperature_fields(draft_temperature, b)
                factors = factor_of(draft_fields), factor_of(fields)
                n, token = verify_sequence_logits(
                    length, tokens, draft, target, accept, sample, bonus, purpose, V_draft, V, *factors, parts, buffers[0]
                )
            else:
                n, token = verify_sequence(
                    length, tokens, draft, target, accept, sample, bonus, purpose, V_draft, V, sums, buffers
                )
        store_int(n, at(of(accepted, b), 0))
        store_int(token, at(of(next_token, b), 0))
        if num_emitted[1] != NUMBER:
            store_int(n + 1, at(of(num_emitted, b), 0))
        if emitted[1] != NUMBER:
            emit_sequence(tokens, n, token, -1, of(emitted, b), K + 1)
    memory[0] = 0  # Numba frees an array after its last use, and an address is none


@compiled
def emit_sequences(B, K, pad, draft_tokens, accepted, next_token, emitted):
    for b in range(B):
        n = min(max(number(accepted, b), 0), K)
        emit_sequence(of(draft_tokens, b), n, number(next_token, b), pad, of(emitted, b), K + 1)


def describe(x, layout, absent=0):
    """A tensor as compiled functions take it, or the number that stands for None."""
    if x is None:
        return absent, int(NUMBER), 0, 0
    strides = 0, *x.stride()
    return x.data_ptr(), NUMBER_OF[x.dtype], strides[layout[0]] * x.itemsize, strides[layout[1]] * x.itemsize


@functools.lru_cache(None)
def helper(process, i):
    """Helper thread i. The process is part of the key because threads do not survive a fork.

    The executor joins it when the interpreter ends: a thread that is then still letting go of tensors would end the process.
    """
    return ThreadPoolExecutor(1, f"spec_verify_xpu {i}")


def work(shares, done, arguments, call):
    """Do shares until none is left. The call is held because its memory must outlive a caller who is interrupted."""
    with contextlib.suppress(queue.Empty):
        while True:
            share = shares.get_nowait()
            try:
                done.put(verify_sequences(*share, *arguments))
            except BaseException as error:  # the caller's to raise, whichever thread it came in
                done.put(error)


def described(call):
    """A call as verify_sequences takes it, without the sequences: numbers, and tensors in the order of ops.Call."""
    K, V = call.max_drafts, call.target_probs.shape[-1]
    drafts, rows = (DENSE, DENSE) if call.cu_drafts is None else (RAGGED_DRAFTS, RAGGED_ROWS)
    S, V_draft = (0, V) if call.draft_probs is None else (len(call.draft_probs), call.draft_probs.shape[-1])
    return (len(call.draft_tokens), K, S, V_draft, V, call.purpose, call.logits), (
        describe(call.draft_tokens, drafts), describe(call.draft_probs, drafts if call.draft_slots is None else DENSE),
        describe(call.target_probs, rows if call.bonus_tokens is None else drafts),
        describe(call.uniform_accept, drafts), describe(call.uniform_sample, rows),
        describe(call.seed, ONE_EACH), describe(call.offset, ONE_EACH),
        describe(call.lengths, ONE_EACH, K), describe(call.cu_drafts, ONE_EACH),
        describe(call.greedy, ONE_EACH, int(call.all_greedy)), describe(call.bonus_tokens, ONE_EACH),
        describe(call.temperature, ONE_EACH, call.temperature_fields),
        describe(call.draft_slots, ONE_EACH), describe(call.draft_temperature, ONE_EACH),
        describe(call.num_emitted, ONE_EACH), describe(call.emitted, DENSE),
        describe(call.accepted, ONE_EACH), describe(call.next_token, ONE_EACH),
    )  # fmt: skip


def shares_of(call):
    """In how many shares a call's sequences are verified."""
    B, cost = len(call.accepted), LOGITS_COST if call.logits else 1
    return max(1, min(B, B * call.target_probs.shape[-1] * cost // GRAIN))


def verify(call):
    """See ops.Call."""
    B, count, (numbers, tensors) = len(call.accepted), shares_of(call), described(call)
    if count == 1:
        verify_sequences(0, B, *numbers, *tensors)
        return
    # Whoever is free takes the next share, so no call waits for a helper that is late or busy with another call.
    shares, done = queue.SimpleQueue(), queue.SimpleQueue()
    for i in range(count):
        shares.put((B * i // count, B * (i + 1) // count))
    for i in range(1, min(count, torch.get_num_threads())):
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and the caller works alone
            helper(os.getpid(), i).submit(work, shares, done, (*numbers, *tensors), call)
    work(shares, done, (*numbers, *tensors), call)
    for _ in range(count):
        error = done.get()  # None where all went well
        if error is not None:
            raise error


def kept(call):
    """What repeats.py needs of a call: no scratch, rows aligned anyhow, and a function of its tensors' addresses.

    None where helpers share the work, since they need the tensors themselves: see `work`.
    """
    if shares_of(call) > 1:
        return None
    B, (numbers, tensors) = len(call.accepted), described(call)
    layouts = [(i, x[1:]) for i, x in enumerate(tensors) if x[1] != NUMBER]

    def run(addresses):
        arguments = list(tensors)
        for (i, layout), address in zip(layouts, addresses):
            arguments[i] = address, *layout
        verify_sequences(0, B, *numbers, *arguments)

    return 0, 0, None, run


def emit(draft_tokens, accepted, next_token, pad, emitted):
    """See `api.emit`."""
    numbers = (describe(x, ONE_EACH) for x in (accepted, next_token))
    emit_sequences(*draft_tokens.shape, pad, describe(draft_tokens, DENSE), *numbers, describe(emitted, DENSE))


def warmup(call=None, vocabulary=None):
    """Compile, or load what an earlier process compiled, for calls of any dtypes and vocabulary."""
    nothing = (0, int(NUMBER), 0, 0)
    verify_sequences(*(0,) * 8, False, *(nothing,) * 18)
    emit_sequences(0, 0, 0, *(nothing,) * 4)
