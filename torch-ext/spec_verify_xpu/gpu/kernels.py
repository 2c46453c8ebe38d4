"""The rule in two Triton launches: sum the chunks of the one row pair that matters, then search the chunk that holds the draw.

Device code only. LIMBS says how a row's weights are summed. A GPU with native 64-bit integers converts them directly. One
without (Gen12LP) gets them as two limbs, fixed(x) = high * 2**22 + low, by float32 and int32 operations that are each
exact; a 32-bit sum holds 512 of them, whatever the row contains.
"""

import triton
import triton.language as tl

HEADER = tl.constexpr(3)  # a sequence's scratch before its chunk sums: accepted, the refused draft or -1, the draw's bits


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
def scale(u, n):
    """floor(u * n / 2**63)"""
    return tl.umulhi(u.to(tl.uint64) << 1, n.to(tl.uint64)).to(tl.int64)


@triton.jit
def first_refused(tokens, draft, target, uniforms, length, V_draft, V, stride_draft, stride_target, FLOAT64: tl.constexpr,
                  POSITIONS: tl.constexpr):
    """(n, token): the first position not accepted, or length; and the draft refused there, -1 if there is none."""
    i = tl.arange(0, POSITIONS)
    counts = i < length
    row = i.to(tl.int64)
    u = tl.load(uniforms + i, mask=counts, other=0)
    t = tl.load(tokens + i, mask=counts, other=-1)
    is_draft = t.to(tl.uint64) < V_draft.to(tl.uint64)  # negative ids are huge
    t = tl.where(is_draft, t, -1).to(tl.int32)
    is_known = is_draft & (t < V)  # elsewhere p is 0, and no q can be accepted
    p = fixed(clamp(tl.load(target + row * stride_target + t, mask=is_known, other=0.0)))
    if draft is None:
        q = tl.full((POSITIONS,), 17592186044416, tl.int64)  # 2**44: a draft without probabilities is certain
    else:
        q = fixed(clamp(tl.load(draft + row * stride_draft + t, mask=is_known, other=0.0)))
    is_accepted = scale(bits(u, FLOAT64), q) < p
    n = tl.minimum(tl.min(tl.where(is_accepted, POSITIONS, i), 0), length)
    return n.to(tl.int64), tl.max(tl.where(i == n, t, -1), 0)


@triton.jit
def entries(row, v, end, ALIGNED: tl.constexpr):
    """Entries v [n, m] of a row, clamped, 0 from `end` on.

    The loads have no mask, which is a branch on Intel GPUs: past the end they repeat an entry that exists, times 0. ALIGNED
    rows start at 16 bytes and hold a multiple of 16 entries, so that loads are wide.
    """
    GROUP: tl.constexpr = 16 if ALIGNED else 1
    start = v & -GROUP
    at = tl.minimum(start, tl.maximum(end - GROUP, 0)) + (v & (GROUP - 1))
    if ALIGNED:
        at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 16))
        pointers = tl.multiple_of(row + at, (1, 16))
    else:
        pointers = row + at
    return clamp(tl.load(pointers).to(tl.float32) * (start < end).to(tl.float32))  # NaN * 0 is NaN, which clamp makes 0


@triton.jit
def row_pair(draft, target, v, token, V_draft, V, ALIGNED: tl.constexpr):
    """Entries v of the row pair as (p, min(p, q)), q being 0 where no draft was refused (token is -1).

    The weight max(0, p - q) is fixed(p) - fixed(min(p, q)), fixed being monotone.
    """
    p = entries(target, v, V, ALIGNED)
    if draft is None:
        return tl.where(v == token, 0.0, p), tl.zeros_like(p)
    else:
        return p, tl.minimum(p, entries(draft, v, tl.where(token < 0, 0, V_draft), ALIGNED))


@triton.jit
def chunk_sums(draft, target, chunk, token, V_draft, V, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
               LIMBS: tl.constexpr):
    """The mass of chunks [n], read SEGMENT entries at a time: [n] int64."""
    v = chunk[:, None] * CHUNK + tl.arange(0, SEGMENT)[None, :]
    if LIMBS:
        high = tl.zeros_like(v)
        low = tl.zeros_like(v)
        for start in range(0, CHUNK, SEGMENT):
            p, q = row_pair(draft, target, v + start, token, V_draft, V, ALIGNED)
            more_high, more_low = weight_limbs(p, q)
            high += more_high
            low += more_low
        return join(tl.sum(high, 1), tl.sum(low, 1))
    else:
        mass = tl.zeros_like(v).to(tl.int64)
        for start in range(0, CHUNK, SEGMENT):
            p, q = row_pair(draft, target, v + start, token, V_draft, V, ALIGNED)
            mass += fixed(p) - fixed(q)
        return tl.sum(mass, 1)


@triton.jit
def running_sums(draft, target, chunk, token, V_draft, V, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, LIMBS: tl.constexpr):
    """The running mass inside each of chunks [n]: [n, CHUNK] int64."""
    v = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    p, q = row_pair(draft, target, v, token, V_draft, V, ALIGNED)
    if LIMBS:
        high, low = tl.associative_scan(weight_limbs(p, q), 1, add)
        return join(high, low)
    else:
        return tl.cumsum(fixed(p) - fixed(q), 1)


# One compiled kernel serves every shape: no argument's value makes another, and ALIGNED says what the compiler may assume.
UNSPECIALIZED = [
    "draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample", "lengths", "scratch", "accepted",
    "next_token", "K", "V_draft", "V", "chunks", "stride_draft_b", "stride_draft_k", "stride_target_b", "stride_target_k",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sum_chunks(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths, scratch, accepted,
               K, V_draft, V, chunks, stride_draft_b, stride_draft_k, stride_target_b, stride_target_k,
               FLOAT64_ACCEPT: tl.constexpr, FLOAT64_SAMPLE: tl.constexpr, POSITIONS: tl.constexpr, ALIGNED: tl.constexpr,
               CHUNK: tl.constexpr, SEGMENT: tl.constexpr, LIMBS: tl.constexpr, CHUNKS: tl.constexpr,
               release: tl.constexpr):
    """grid (B, ceil(chunks / CHUNKS)): each program finds the refused position, and sums CHUNKS chunks of its row pair."""
    if release is not None:
        release()
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    target_probs += b * stride_target_b
    if draft_probs is not None:
        draft_probs += b * stride_draft_b
    length = K
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), K).to(tl.int32)

    n, token = first_refused(draft_tokens + b * K, draft_probs, target_probs, uniform_accept + b * K, length, V_draft, V,
                             stride_draft_k, stride_target_k, FLOAT64_ACCEPT, POSITIONS)
    target_probs += n * stride_target_k
    if draft_probs is not None:
        draft_probs += tl.where(token < 0, 0, n) * stride_draft_k  # a row that exists, also past the last draft

    scratch += b * (HEADER + chunks)
    chunk = c * CHUNKS + tl.arange(0, CHUNKS)
    sums = chunk_sums(draft_probs, target_probs, chunk, token, V_draft, V, ALIGNED, CHUNK, SEGMENT, LIMBS)
    tl.store(scratch + HEADER + chunk, sums, mask=chunk < chunks)
    if c == 0:
        u = bits(tl.load(uniform_sample + b * (K + 1) + n), FLOAT64_SAMPLE)
        tl.store(scratch, n)
        tl.store(scratch + 1, token.to(tl.int64))
        tl.store(scratch + 2, u)
        tl.store(accepted + b, n)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def locate(draft_probs, target_probs, scratch, next_token, V_draft, V, chunks, stride_draft_b, stride_draft_k, stride_target_b,
           stride_target_k, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, LIMBS: tl.constexpr, CAPACITY: tl.constexpr,
           wait: tl.constexpr):
    """grid (B,): find the chunk that holds the threshold among at most CAPACITY sums, and the entry in it."""
    b = tl.program_id(0).to(tl.int64)
    scratch += b * (HEADER + chunks)
    i = tl.arange(0, CAPACITY)
    one = tl.arange(0, 1)
    if wait is not None:
        wait()
    n = tl.load(scratch)
    token = tl.load(scratch + 1).to(tl.int32)
    u = tl.load(scratch + 2)
    sums = tl.load(scratch + HEADER + i, mask=i < chunks, other=0)
    target_probs += b * stride_target_b + n * stride_target_k
    if draft_probs is not None:
        draft_probs += b * stride_draft_b + tl.where(token < 0, 0, n) * stride_draft_k

    total, _ = sum_both(sums, i, LIMBS)
    cumulative = tl.cumsum(sums, 0)
    if (total == 0) & (token >= 0):  # rare: the residual has no mass, so the draw is from the target row
        token = tl.full((), -1, tl.int32)
        for c in range(0, chunks):
            mass = tl.sum(chunk_sums(None, target_probs, c + one, token, V_draft, V, ALIGNED, CHUNK, CHUNK, LIMBS))
            sums += tl.where(i == c, mass, 0)
            cumulative += tl.where(i >= c, mass, 0)
            total += mass

    threshold = scale(u, total)
    is_before = cumulative <= threshold
    before, chunk = sum_both(tl.where(is_before, sums, 0), is_before.to(tl.int32), LIMBS)
    running = running_sums(draft_probs, target_probs, chunk + one, token, V_draft, V, ALIGNED, CHUNK, LIMBS)
    entry = tl.sum((running <= threshold - before).to(tl.int32))
    tl.store(next_token + b, tl.where(total > 0, chunk * CHUNK + entry, 0).to(tl.int64))
