"""The rule's functions of numbers on the device: fixed, bits, random_bits, order, scale (see rule.py).

There are two ways to sum weights. A GPU with native 64-bit integers converts a probability to one directly. One without
(Gen12LP) gets two limbs, fixed(x) = high * 2**22 + low, by float32 and int32 operations that are each exact; a 32-bit sum
holds 512 of them, whatever the row contains.
"""

import triton
import triton.language as tl

from .. import fixed_point, rule

LARGEST_WEIGHT = tl.constexpr(rule.weigh(0.0, 1.0))  # that of a block's maximum
LOG2E = tl.constexpr(rule.LOG2E)
ALMOST_HALF = tl.constexpr(rule.ALMOST_HALF)
SMALLEST_POWER = tl.constexpr(rule.SMALLEST_POWER)
WHOLE = tl.constexpr(fixed_point.WHOLE)
C0, C1, C2, C3, C4 = map(tl.constexpr, rule.COEFFICIENTS)


@triton.jit
def clamp(x):
    """Into [0, 1]; NaN to 0, since maximum returns the operand that is a number."""
    return tl.minimum(tl.maximum(x.to(tl.float32), 0.0), 1.0)


@triton.jit
def fixed(x):
    """Clamped probability -> int64 in [0, 2**44], by way of unsigned, which is half the work where 64 bits are emulated."""
    return (x * 17592186044416.0).to(tl.uint64).to(tl.int64)


@triton.jit
def limbs(x):
    """Clamped probability -> (high, low), int32."""
    scaled = x * 4194304.0  # 2**22
    high = scaled.to(tl.int32)
    return high, ((scaled - high.to(tl.float32)) * 4194304.0).to(tl.int32)


@triton.jit
def weight_limbs(p, q):
    """The limbs of fixed(p) - fixed(q), the low one of either sign."""
    p_high, p_low = limbs(p)
    q_high, q_low = limbs(q)
    return p_high - q_high, p_low - q_low


@triton.jit
def join(high, low):
    """Sums of 512 limbs -> int64. The high one is at most 512 * 2**22 = 2**31, one more than int32 holds."""
    return (high.to(tl.uint32, bitcast=True).to(tl.int64) << 22) + low.to(tl.int64)


@triton.jit
def add(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_both(a, b, LIMBS: tl.constexpr):
    """The sums of a [n] int64 and b [n] int32. An int64 sum by itself becomes a loop over the lanes on Intel GPUs."""
    if LIMBS:
        return tl.reduce((a, b), 0, add)
    else:
        return tl.sum(a, 0), tl.sum(b, 0)


@triton.jit
def bits(u, FLOAT64: tl.constexpr):
    """Uniform -> 63 bits. A float64 comes as its fields in int64: u = mantissa * 2**(exponent - 1075)."""
    if u.dtype == tl.float32:
        below_one = tl.minimum(tl.maximum(u, 0.0), 0.999999940395355224609375)  # 1 - 2**-24
        return (below_one * 9223372036854775808.0).to(tl.int64)
    elif FLOAT64:
        u = tl.where((u > 0) & (u <= 0x7FF0000000000000), u, 0)  # greater than zero, and not NaN
        u = tl.minimum(u, 0x3FEFFFFFFFFFFFFF)  # 1 - 2**-53
        shift = (u >> 52) - 1012
        mantissa = (u & 0xFFFFFFFFFFFFF) | 0x10000000000000
        return (mantissa << tl.maximum(shift, 0)) >> tl.minimum(tl.maximum(-shift, 0), 63)
    else:
        return u & 0x7FFFFFFFFFFFFFFF


@triton.jit
def random_bits(seed, offset, position, purpose):
    """63 bits of Philox-4x32-10: the seed is its key, the rest its counter, words 0 and 1 its output."""
    low, high, _, _ = tl.philox(seed, offset.to(tl.uint32), (offset >> 32).to(tl.uint32), position, purpose)
    return ((high.to(tl.int64) << 32) | low.to(tl.int64)) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def order(x):
    """A float as an integer that orders as numbers do: -0 is 0, and NaN is less than any. A float64 comes as its fields."""
    if x.dtype == tl.int64:
        fields = x
        INFINITY: tl.constexpr = 0x7FF0000000000000
        LIMIT: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    elif x.dtype == tl.float32:
        fields = x.to(tl.int32, bitcast=True)
        INFINITY: tl.constexpr = 0x7F800000
        LIMIT: tl.constexpr = 0x7FFFFFFF
    else:
        fields = x.to(tl.int16, bitcast=True).to(tl.int32)
        INFINITY: tl.constexpr = 0x7C00 if x.dtype == tl.float16 else 0x7F80
        LIMIT: tl.constexpr = 0x7FFF
    size = fields & LIMIT
    return tl.where(size > INFINITY, -LIMIT - 1, tl.where(fields < 0, -size, size))


@triton.jit
def scale(u, n):
    """floor(u * n / 2**63)"""
    return tl.umulhi(u.to(tl.uint64) << 1, n.to(tl.uint64)).to(tl.int64)


# What follows is of logits: rule.probabilities and the functions that it calls.


@triton.jit
def divide(dividend, divisor):
    """floor(dividend / divisor): int64 in [2**60, 2**61) by uint32 in [2**30, 2**31] -> int32.

    What Intel's compiler makes of a division in 64 bits takes fp64 or hundreds of instructions. Here float32 only guesses, to
    2**-20 of it, first from below to ten bits or less, then the rest to one; remainders are integers.
    """
    inverse = 1.0 / divisor.to(tl.float32)
    high = ((dividend >> 30).to(tl.int32).to(tl.float32) * (inverse * 1048576.0)).to(tl.int32) - 4  # 2**20
    rest = dividend - ((high.to(tl.uint32).to(tl.uint64) * divisor.to(tl.uint64)).to(tl.int64) << 10)  # below 2**44
    low = ((rest >> 14).to(tl.int32).to(tl.float32) * (inverse * 16384.0)).to(tl.int32)
    rest -= (low.to(tl.uint32).to(tl.uint64) * divisor.to(tl.uint64)).to(tl.int64)
    return (high << 10) + low + (rest >= divisor.to(tl.int64)).to(tl.int32) - (rest < 0).to(tl.int32)


@triton.jit
def scale_of(temperature, LIMBS: tl.constexpr):
    """log2(e) / temperature, to the nearest float32."""
    T = tl.minimum(tl.maximum(temperature, 8.67361737988403547e-19), 1152921504606846976.0)  # 2**-60, 2**60
    if LIMBS:  # Intel's quotients of floats are not the nearest: that of the mantissas in integers, rounded. It is never a tie
        fields = T.to(tl.int32, bitcast=True)
        divisor = (fields & 0x7FFFFF) | 0x800000
        is_less = (divisor > 0xB8AA3B).to(tl.int32)  # than 1, what the mantissas' quotient is
        mantissas = divide(tl.full((), 0xB8AA3B << 37, tl.int64), divisor.to(tl.uint32) << 7)
        rounded = (mantissas + (64 >> is_less)) >> (7 - is_less)
        return (((254 - (fields >> 23) - is_less) << 23) + (rounded - 0x800000)).to(tl.float32, bitcast=True)
    else:
        return tl.div_rn(T * 0.0 + LOG2E, T)


@triton.jit
def power(x, scale_by):
    """753.2 * 2**(x * scale_by) for x <= 0, as p and a float32 r whose last bits are n + 22: the value is p * 2**n."""
    t = tl.maximum(x * scale_by, SMALLEST_POWER)  # of NaN too
    r = t + WHOLE
    g = t + (WHOLE + 1 - r)
    return tl.fma(tl.fma(tl.fma(tl.fma(g + C0, g, C1), g, C2), g, C3), g, C4), r


@triton.jit
def weigh_finite(x, maximum, scale_by):
    """The weights of a block's logits x, below 2**32: uint32, right where the maximum is not inf."""
    p, r = power(x - maximum, scale_by)
    y = (p.to(tl.int32, bitcast=True) + (r.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)  # p * 2**(n + 22)
    return (y + ALMOST_HALF).to(tl.uint32)


@triton.jit
def weigh(x, maximum, scale_by):
    """The weights of a block's logits x: uint32."""
    w = weigh_finite(x, maximum, scale_by)
    if maximum == float("inf"):  # inf - inf was NaN
        w = tl.where(x == maximum, LARGEST_WEIGHT, 0).to(tl.uint32)
    return w


@triton.jit
def size(x, LIMBS: tl.constexpr):
    """How many bits a positive int64 has. Without the bit behind the first it does not round up to more."""
    if LIMBS:
        high = (x >> 32).to(tl.uint32)
        word = tl.where(high > 0, high, x.to(tl.uint32))
        return ((word & ~(word >> 1)).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - tl.where(high > 0, 94, 126)
    else:
        return ((x & ~(x >> 1)).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126


@triton.jit
def quotient(total, mass, LIMBS: tl.constexpr):
    """(factor, shift): of the total, a weight of the mass that shares it gets weight * factor >> shift. Some may be left."""
    total = tl.maximum(total, 1)
    mass = tl.maximum(mass, 0x80000000)  # where there is any it is more
    dividend = total << (61 - size(total, LIMBS)).to(tl.int64)
    divisor = (mass >> (size(mass, LIMBS) - 31).to(tl.int64)) + 1
    factor = divide(dividend, divisor.to(tl.uint32))
    return factor.to(tl.int64), tl.minimum(30 + size(mass, LIMBS) - size(total, LIMBS), 63).to(tl.int64)


@triton.jit
def total_of(x, LIMBS: tl.constexpr):
    """The sum of entries that are below 2**32 (uint32, up to 2**15 of them), or that with their sum are at most 2**44 (int64).

    With limbs two sums of 32 bits: of high parts, and of all that wraps around, which tells that of the low ones.
    """
    if LIMBS:
        LOW: tl.constexpr = 16 if x.dtype == tl.uint32 else 22
        high = tl.sum((x >> LOW).to(tl.int32))
        low = (tl.sum(x.to(tl.int32)) - (high << LOW)).to(tl.uint32)
        return (high.to(tl.int64) << LOW) + low.to(tl.int64)
    else:
        return tl.sum(x.to(tl.int64))


@triton.jit
def left_of(total, shares):
    """What shares leave of their total: less than 2**32, so that sums which wrap around tell it."""
    return (total.to(tl.int32) - tl.sum(shares.to(tl.int32))).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def running_sum(x, axis: tl.constexpr, LIMBS: tl.constexpr):
    """Running sums of up to 1,024 entries whose sum is at most 2**44; with limbs of 22 bits, of which the sums are unsigned."""
    if LIMBS:
        high, low = tl.associative_scan(((x >> 22).to(tl.int32), (x & 0x3FFFFF).to(tl.int32)), axis, add)
        return (high.to(tl.int64) << 22) + low.to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        return tl.cumsum(x, axis)


@triton.jit
def mass_of(weights, maximum, top, scale_by, LIMBS: tl.constexpr):
    """A block's mass, from the sum of its weights and the maxima of block and row."""
    p, r = power(tl.where(maximum == top, 0.0, maximum - top), scale_by)
    by = tl.minimum(10 - (r - WHOLE).to(tl.int32), 63)
    return (weights >> 3) * (p * 16384.0).to(tl.int32 if LIMBS else tl.int64).to(tl.int64) >> by.to(tl.int64)


@triton.jit
def apportion_to_blocks(maxima, sums, maximum, weights, block, scale_by, LIMBS: tl.constexpr):
    """What blocks [n] get of 2**44, and what one of them gets, of a maximum and a sum of weights.

    That one's does not wait for being picked from all of them.
    """
    top = tl.max(maxima, 0)
    masses = mass_of(sums, maxima, top, scale_by, LIMBS)
    total = tl.sum(masses, 0)
    i = tl.arange(0, maxima.shape[0])
    first = 511 - (tl.max((masses << 9) + (511 - i), 0) & 511).to(tl.int32)  # of the largest, which is below 2**54
    one = total * 0 + 17592186044416  # 2**44
    factor, shift = quotient(one, total, LIMBS)
    factor <<= 53 - shift
    shares = scale(masses << 10, tl.broadcast_to(factor, masses.shape))
    left = tl.where(total > 0, left_of(one, shares), 0)
    share = scale(mass_of(weights, maximum, top, scale_by, LIMBS) << 10, factor)
    return shares + tl.where(i == first, left, 0), share + tl.where(block == first, left, 0)


@triton.jit
def share(w, factor, shift, LIMBS: tl.constexpr):
    """What weights get by `quotient`'s factor, which has 31 bits: one product of 32 bits by 32."""
    if LIMBS:  # both halves are shifted by themselves
        factor = factor.to(tl.uint32) | (w & 0)  # of its shape
        low = w * factor
        high = tl.umulhi(w, factor)
        by = shift.to(tl.uint32) & 31
        is_less = shift < 32
        low = tl.where(is_less, low, high) >> by
        high = tl.where(is_less, high, 0)
        low |= high << 1 << (31 - by)
        return ((high >> by).to(tl.int64) << 32) | low.to(tl.int64)
    else:
        return ((w.to(tl.uint32).to(tl.uint64) * factor.to(tl.uint32).to(tl.uint64)) >> shift.to(tl.uint64)).to(tl.int64)


@triton.jit
def is_largest(w):
    """Whether a weight is that of its block's maximum."""
    return w.to(tl.int32, bitcast=True) == LARGEST_WEIGHT - 4294967296  # 2**32


@triton.jit
def first_largest(w):
    """Where the first of the largest weights [1, n] of a block is."""
    i = tl.arange(0, w.shape[1])[None, :]
    return tl.min(tl.where(is_largest(w), i, 0x7FFFFFFF))


@triton.jit
def give_rest(shares, w, mass):
    """shares [1, n] of a block whose weights are w, with what they leave of its mass given to the first of the largest; where
    that is; and how much it got.
    """
    first = first_largest(w)
    rest = left_of(mass, shares)
    return shares + tl.where(tl.arange(0, shares.shape[1])[None, :] == first, rest, 0), first, rest
