"""The rule's functions of numbers on torch tensors, without fp64: fixed, bits, scale, order (see rule.py)."""

import torch

from .rule import LOW_32, LOW_63, ONE, UNIFORM_RANGE

LOW_31 = 2**31 - 1
FIELDS = {  # a float's fields as an integer: those of infinity, and the integer's dtype
    torch.float16: (0x7C00, torch.int16),
    torch.bfloat16: (0x7F80, torch.int16),
    torch.float32: (0x7F800000, torch.int32),
    torch.float64: (0x7FF0000000000000, torch.int64),
}


def scaled_(x):
    """A float32 tensor in place: x * 2**44, x clamped into [0, 1], NaN to 0. What is left to do is to drop the fraction."""
    return torch.nan_to_num_(x, nan=0.0, posinf=1.0, neginf=0.0).clamp_(0, 1).mul_(float(ONE))


def fixed(x):
    """Probabilities (float32, float16, bfloat16) as int64 in [0, 2**44]."""
    return scaled_(x.to(torch.float32, copy=True)).long()


def bits(u):
    """Uniforms (int64 random bits, float32, float64) as 63 bits in int64."""
    if u.dtype == torch.int64:
        return u & LOW_63
    if u.dtype == torch.float32:
        u = torch.nan_to_num(u, nan=0.0, posinf=1.0, neginf=0.0)
        return u.clamp_(0, 1 - 2**-24).mul_(float(UNIFORM_RANGE)).long()
    # float64 by its fields: u = mantissa * 2**(exponent - 1075), so u * 2**63 is the mantissa shifted by exponent - 1012.
    fields = u.view(torch.int64)
    usable = (fields > 0) & (fields <= 0x7FF0000000000000)  # greater than zero, and not NaN
    fields = torch.where(usable, fields, 0).clamp(max=0x3FEFFFFFFFFFFFFF)  # 1 - 2**-53
    shift = (fields >> 52) - 1012
    mantissa = (fields & (2**52 - 1)) | 2**52
    return (mantissa << shift.clamp(min=0)) >> (-shift).clamp(0, 63)


def scale(u, n):
    """floor(u * n / 2**63) for u and n in [0, 2**63), by halves of 32 bits. Only the product of the low ones may wrap."""
    u1, u0, n1, n0 = u >> 32, u & LOW_32, n >> 32, n & LOW_32
    a, b = u1 * n0, u0 * n1  # of weight 2**32, so 2**31 of them are one of the result
    low = (u0 * n0 >> 32) & LOW_32
    carry = (a & LOW_31) + (b & LOW_31) + low >> 31
    return (u1 * n1 << 1) + (a >> 31) + (b >> 31) + carry


def order(x):
    """Floats of any dtype as integers that are ordered as rule.argmax orders: -0 is 0, and NaN is less than any number."""
    infinity, integer = FIELDS[x.dtype]
    limits, fields = torch.iinfo(integer), x.view(integer)
    size = fields & limits.max
    return torch.where(fields < 0, -size, size).masked_fill_(size > infinity, limits.min)
