"""The rule's functions of numbers on torch tensors, without fp64: fixed, bits, scale, order, probabilities (see rule.py)."""

from math import inf

import torch

from .rule import ALMOST_HALF, BLOCK, COEFFICIENTS, LOG2E, LOW_32, LOW_63, ONE, SMALLEST_POWER, UNIFORM_RANGE

LOW_31, LOW_33 = 2**31 - 1, 2**33 - 1
WHOLE = 1.5 * 2**23 + 22  # a float32 less than 2**22 from it is an integer, which its low bits hold
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
    """floor(u * n / 2**63) for u and n in [0, 2**63), by halves of 32 and 31 bits."""
    u1, u0, n1, n0 = u >> 32, u & LOW_32, n >> 31, n & LOW_31
    middle = u0 * n1 + (u0 * n0 >> 31)  # 2**32 of it are one of the result, as 2**31 of u1 * n0; both below 2**64, unsigned
    return u1 * n1 + (u1 * n0 + (middle >> 1 & LOW_63) >> 31 & LOW_33)


def order(x):
    """Floats of any dtype as integers that are ordered as rule.argmax orders: -0 is 0, and NaN is less than any number."""
    infinity, integer = FIELDS[x.dtype]
    limits, fields = torch.iinfo(integer), x.view(integer)
    size = fields & limits.max
    return torch.where(fields < 0, -size, size).masked_fill_(size > infinity, limits.min)


def probabilities(logits, temperature):
    """rule.probabilities of each row of [.., V], as int64. Temperatures, float32, broadcast to [..]."""
    blocks, scale = blocks_of(logits), scale_of(temperature)
    maxima, masses = masses_of(blocks, scale)
    return apportion(masses[..., None], weigh(blocks, maxima, scale)).flatten(-2)[..., : logits.shape[-1]]


def probability(logits, temperature, ids):
    """That of one entry of each row, ids [..]. Of its own block alone more is worked out than the mass."""
    blocks, scale = blocks_of(logits), scale_of(temperature)
    maxima, masses = masses_of(blocks, scale)
    block = ids[..., None] // BLOCK
    own = blocks.gather(-2, block[..., None].expand(*ids.shape, 1, blocks.shape[-1]))
    weights = weigh(own, maxima.gather(-2, block[..., None]), scale)[..., 0, :]
    return apportion(masses.gather(-1, block), weights).gather(-1, ids[..., None] % BLOCK)[..., 0]


def blocks_of(logits):
    """[.., V] as float32 [.., blocks, BLOCK], or one block of V, with -inf in place of NaN and past the end."""
    *leading, V = logits.shape
    size = min(V, BLOCK)
    x = logits.new_empty((*leading, -(-V // size) * size), dtype=torch.float32)
    x[..., :V] = logits
    x[..., V:] = -inf
    return torch.nan_to_num_(x, nan=-inf, posinf=inf, neginf=-inf).unflatten(-1, (-1, size))


def scale_of(temperature):
    """What logits are multiplied by, [.., 1, 1]. (torch divides a number by a tensor with one rounding too many.)"""
    temperature = temperature.clamp(2.0**-60, 2.0**60)[..., None, None]
    return torch.full_like(temperature, LOG2E) / temperature


def masses_of(blocks, scale):
    """Each block's largest logit, [.., blocks, 1], and its share of ONE, [.., blocks]."""
    maxima = blocks.amax(-1, keepdim=True)
    sums = weigh(blocks, maxima, scale).sum(-1)
    p, n = power(maxima[..., 0], maxima.amax(-2), scale[..., 0])
    masses = (sums >> 3) * p.mul_(2.0**14).long() >> (10 - n.long()).clamp_(max=63)
    total = (masses.sum(-1, keepdim=True) > 0) * ONE
    return maxima, apportion(total, masses, scaled_product)


def apportion(total, weights, product=lambda w, quotient, k: w * quotient >> k.clamp(max=63)):
    """rule.apportion of total [.., 1] by the last dimension of weights: int64. The total is 0 where no weight is more."""
    sums = weights.sum(-1, keepdim=True)
    size, total_size = bit_length(sums), bit_length(total)
    quotient = (total << 61 - total_size) // ((sums >> (size - 31).clamp(min=0)) + 1)
    shares = product(weights, quotient, 30 + size - total_size)
    return shares.scatter_add_(-1, weights.argmax(-1, keepdim=True), total - shares.sum(-1, keepdim=True))


def scaled_product(w, quotient, k):
    """w * quotient >> k, of masses below 2**53 and k from 28 to 47, where the product would not fit."""
    return scale(w << 10, quotient << 53 - k)


def bit_length(x):
    """Of integers in [0, 2**63). Without the bits that follow a one, rounding to float32 reaches no next power of two."""
    fields = (x & ~(x >> 1)).float().view(torch.int32)
    return ((fields >> 23) - 126).clamp_(min=0)


def weigh(x, maximum, scale):
    """rule.weigh of x below a maximum, as int64."""
    p, n = power(x, maximum, scale)
    fields = n.add_(WHOLE).view(torch.int32)
    fields <<= 23
    p.view(torch.int32).add_(fields)  # to its exponent, which makes it p * 2**(n + 22)
    return p.add_(ALMOST_HALF).long()


def power(x, maximum, scale):
    """rule.power of x below a maximum, as p and n, both float32. In place for speed: new memory costs more than arithmetic."""
    # Infinity less itself, which is NaN, is 0, but for -inf, which is below every number.
    t = (x - maximum.clamp(min=torch.finfo(torch.float32).min)).mul_(scale)
    torch.nan_to_num_(t, nan=0.0, neginf=SMALLEST_POWER).clamp_(min=SMALLEST_POWER)
    n = (t + WHOLE).sub_(WHOLE)
    g = t.sub_(n).add_(1)
    p, g = g + COEFFICIENTS[0], g.mul_(2.0**24).long()
    for c in COEFFICIENTS[1:]:  # a product and sum that are rounded once are integers of less than 2**57, made a float
        p = p.mul_(2.0**22).long().mul_(g).add_(int(c * 2**46)).float().mul_(2.0**-46)
    return p, n
