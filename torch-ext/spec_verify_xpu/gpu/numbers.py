"""The rule's functions of numbers on the device: fixed, bits, random_bits, order, scale (see rule.py).

There are two ways to sum weights. A GPU with native 64-bit integers converts a probability to one directly. One without
(Gen12LP) gets two limbs, fixed(x) = high * 2**22 + low, by float32 and int32 operations that are each exact; a 32-bit sum
holds 512 of them, whatever the row contains.
"""

import triton
import triton.language as tl


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
