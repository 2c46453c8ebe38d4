"""The rule in two Triton launches: sum the chunks of the one row pair that matters, then search the chunk that holds the draw.

Device code only. A greedy sequence takes the same two: the largest entry of each of its rows' chunks, then of each row.
"""

import triton
import triton.language as tl

from .numbers import add, bits, clamp, fixed, join, order, random_bits, scale, sum_both, weight_limbs

HEADER = tl.constexpr(2)  # a sequence's scratch before its chunk sums: accepted, and the refused draft or -1
ACCEPT = tl.constexpr(0)  # rule.ACCEPT


@triton.jit
def drafts_of(b, K, T, lengths, cu_drafts):
    """Of sequence b: how many drafts stand before its own, and how many of its own count."""
    if cu_drafts is not None:
        start = tl.minimum(tl.maximum(tl.load(cu_drafts + b).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_drafts + b + 1).to(tl.int64), 0), T)
        return start, tl.minimum(tl.maximum(end - start, 0), K).to(tl.int32)
    elif lengths is not None:
        return b * K, tl.minimum(tl.maximum(tl.load(lengths + b), 0), K).to(tl.int32)
    else:
        return b * K, K


@triton.jit
def first_row(b, before, stride_b, stride_k, cu_drafts):
    """Where the rows of sequence b begin. In a ragged batch they stand one behind the other, `before` of them before b's."""
    if cu_drafts is not None:
        return before * stride_k
    else:
        return b * stride_b


@triton.jit
def rows_before(b, start, bonus_tokens):
    """How many of the target's rows stand before sequence b's in a ragged batch, `start` drafts being before its own.

    A sequence has a row for each draft and one more, which it has not where a bonus token is given in its place.
    """
    if bonus_tokens is None:
        return start + b
    else:
        return start


@triton.jit
def has_row(i, length, bonus_tokens):
    """Whether a sequence of so many drafts has a row of the target at position i."""
    if bonus_tokens is None:
        return i <= length
    else:
        return i < length


@triton.jit
def row_to_draw_from(row, V, n, length, bonus_tokens):
    """(row, V): no entries of row 0, since there may be no other, where the bonus token is given."""
    if bonus_tokens is None:
        return row, V
    else:
        return tl.where(n < length, row, 0), tl.where(n < length, V, 0)


@triton.jit
def even(chunks):
    return (chunks + 1) // 2 * 2


@triton.jit
def first_refused(tokens, draft, target, uniforms, seed, offset, start, draft_row, target_row, exist, length, V_draft, V,
                  stride_draft, stride_target, FLOAT64: tl.constexpr, POSITIONS: tl.constexpr):
    """(n, token): the first position not accepted, or length; and the draft refused there, -1 if there is none.

    The drafts are those from `start` on, of which so many `exist`, and the rows those from draft_row and target_row on. No
    load waits for the length.
    """
    i = tl.arange(0, POSITIONS)
    exists = i < exist
    row = i.to(tl.int64)
    if seed is None:
        u = bits(tl.load(uniforms + start + i, mask=exists, other=0), FLOAT64)
    else:
        u = random_bits(tl.load(seed), tl.load(offset), i, ACCEPT)
    t = tl.load(tokens + start + i, mask=exists, other=-1)
    is_draft = t.to(tl.uint64) < V_draft.to(tl.uint64)  # negative ids are huge
    t = tl.where(is_draft, t, -1).to(tl.int32)
    is_known = is_draft & (t < V)  # elsewhere p is 0, and no q can be accepted
    p = fixed(clamp(tl.load(target + target_row + row * stride_target + t, mask=is_known, other=0.0)))
    if draft is None:
        q = tl.full((POSITIONS,), 17592186044416, tl.int64)  # 2**44: a draft without probabilities is certain
    else:
        q = fixed(clamp(tl.load(draft + draft_row + row * stride_draft + t, mask=is_known, other=0.0)))
    n = tl.minimum(tl.min(tl.where(scale(u, q) < p, POSITIONS, i), 0), length)
    return n.to(tl.int64), tl.max(tl.where((i == n) & (i < length), t, -1), 0)


@triton.jit
def bits_of_draw(uniforms, seed, offset, position, exists, FLOAT64: tl.constexpr, PURPOSE: tl.constexpr):
    """63 bits for the draw at a position, or at each of several."""
    if seed is None:
        return bits(tl.load(uniforms + position, mask=exists, other=0), FLOAT64)
    else:
        return random_bits(tl.load(seed), tl.load(offset), position.to(tl.int32), PURPOSE)


@triton.jit
def load_entries(row, v, end, ALIGNED: tl.constexpr, LIMBS: tl.constexpr, OTHER: tl.constexpr = 0):
    """Entries v [n, m] of a row, and which of them exist: from `end` on, they are OTHER, or with LIMBS others are repeated.

    Where limbs are summed the loads so have no mask, which is a branch on Intel GPUs. ALIGNED rows start at 16 bytes and
    hold a multiple of 16 entries, so that loads are wide.
    """
    if not LIMBS:
        pointers = row + v
        if ALIGNED:
            pointers = tl.multiple_of(pointers, (1, 16))
            end = end // 16 * 16  # which is itself, and tells the compiler
        return tl.load(pointers, mask=v < end, other=OTHER), v < end
    GROUP: tl.constexpr = 16 if ALIGNED else 1
    start = v & -GROUP
    at = tl.minimum(start, tl.maximum(end - GROUP, 0)) + (v & (GROUP - 1))
    if ALIGNED:
        at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 16))
        pointers = tl.multiple_of(row + at, (1, 16))
    else:
        pointers = row + at
    return tl.load(pointers), start < end


@triton.jit
def entries(row, v, end, ALIGNED: tl.constexpr, LIMBS: tl.constexpr):
    """Entries v [n, m] of a row, clamped, 0 from `end` on."""
    x, exists = load_entries(row, v, end, ALIGNED, LIMBS)
    if LIMBS:
        return clamp(x.to(tl.float32) * exists.to(tl.float32))  # NaN * 0 is NaN, which clamp makes 0
    else:
        return clamp(x)


@triton.jit
def row_pair(draft, target, v, token, V_draft, V, ALIGNED: tl.constexpr, LIMBS: tl.constexpr):
    """Entries v of the row pair as (p, min(p, q)), q being 0 where no draft was refused (token is -1).

    The weight max(0, p - q) is fixed(p) - fixed(min(p, q)), fixed being monotone.
    """
    p = entries(target, v, V, ALIGNED, LIMBS)
    if draft is None:
        return tl.where(v == token, 0.0, p), tl.zeros_like(p)
    else:
        return p, tl.minimum(p, entries(draft, v, tl.where(token < 0, 0, V_draft), ALIGNED, LIMBS))


@triton.jit
def chunk_sums(draft, target, chunk, token, V_draft, V, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
               LIMBS: tl.constexpr):
    """The mass of chunks [n], read SEGMENT entries at a time: [n] int64."""
    v = chunk[:, None] * CHUNK + tl.arange(0, SEGMENT)[None, :]
    if LIMBS:
        high = tl.zeros_like(v)
        low = tl.zeros_like(v)
        for start in range(0, CHUNK, SEGMENT):
            p, q = row_pair(draft, target, v + start, token, V_draft, V, ALIGNED, LIMBS)
            more_high, more_low = weight_limbs(p, q)
            high += more_high
            low += more_low
        return join(tl.sum(high, 1), tl.sum(low, 1))
    else:
        mass = tl.zeros_like(v).to(tl.int64)
        for start in range(0, CHUNK, SEGMENT):
            p, q = row_pair(draft, target, v + start, token, V_draft, V, ALIGNED, LIMBS)
            mass += fixed(p) - fixed(q)
        return tl.sum(mass, 1)


@triton.jit
def running_sums(p, q, LIMBS: tl.constexpr):
    """(running mass, mass) of chunk's entries, [1, CHUNK]."""
    if LIMBS:
        high, low = weight_limbs(p, q)
        running_high, running_low = tl.associative_scan((high, low), 1, add)
        return join(running_high, running_low), join(high, low)
    else:
        mass = fixed(p) - fixed(q)
        return tl.cumsum(mass, 1), mass


@triton.jit
def largest_entries(target, bests, bonus_tokens, length, V, stride_target_k, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
                    SEGMENT: tl.constexpr, CHUNKS: tl.constexpr, LIMBS: tl.constexpr):
    """Write the largest of this program's entries of each row, as `order` has it, and the first place where it is.

    The programs of the grid's third dimension share the rows.
    """
    FLOAT64: tl.constexpr = target.dtype.element_ty == tl.int64
    LEAST: tl.constexpr = -0x8000000000000000 if FLOAT64 else -0x80000000
    c = tl.program_id(1)
    programs = tl.num_programs(1)
    v = (c * CHUNKS + tl.arange(0, CHUNKS))[:, None] * CHUNK + tl.arange(0, SEGMENT)[None, :]
    end = CHUNK
    if FLOAT64:
        end = tl.minimum(V, CHUNK)  # a loop that is not unrolled, which would spill on Intel GPUs
    for row in range(tl.program_id(2), length + 1 if bonus_tokens is None else length, tl.num_programs(2)):
        best = tl.full((CHUNKS, SEGMENT), LEAST, tl.int64 if FLOAT64 else tl.int32)
        place = v
        for start in range(0, end, SEGMENT):
            x, exists = load_entries(target + tl.cast(row, tl.int64) * stride_target_k, v + start, V, ALIGNED, LIMBS)
            x = tl.where(exists, order(x), LEAST)
            place = tl.where(x > best, v + start, place)
            best = tl.maximum(best, x)
        top = tl.max(best)
        words = bests + row * 2 * programs + c
        tl.store(words, top.to(tl.int64))
        tl.store(words + programs, tl.min(tl.where(best == top, place, 0x7FFFFFFF)).to(tl.int64))


@triton.jit
def largest_of_row(words, n, apart, CAPACITY: tl.constexpr):
    """The argmax of a row from the largest entries of its n parts, and their places, which stand `apart` words behind."""
    i = tl.arange(0, CAPACITY)
    best = tl.load(words + i, mask=i < n, other=-0x8000000000000000)
    place = tl.load(words + i + apart, mask=i < n, other=0x7FFFFFFF).to(tl.int32)
    return tl.min(tl.where(best == tl.max(best, 0), place, 0x7FFFFFFF), 0).to(tl.int64)


@triton.jit
def parts_of_row(n, length, programs, bonus_tokens):
    """In how many parts the row at position n was read: none, if there is no such row."""
    if bonus_tokens is None:
        return programs
    else:
        return tl.where(n < length, programs, 0)


@triton.jit
def follow_largest(tokens, bests, bonus_tokens, length, programs, CAPACITY: tl.constexpr):
    """(accepted, next token) of a greedy sequence: how many drafts are their row's argmax, and the argmax that follows.

    Where there is no row that follows, the token is one that no draft is.
    """
    n = length * 0
    token = largest_of_row(bests, parts_of_row(n, length, programs, bonus_tokens), programs, CAPACITY)
    while tl.load(tokens + n, mask=n < length, other=-1) == token:
        n += 1
        parts = parts_of_row(n, length, programs, bonus_tokens)
        token = largest_of_row(bests + n * 2 * programs, parts, programs, CAPACITY)
    return n.to(tl.int64), token


@triton.jit
def write_others(emitted, tokens, n, pad, K, POSITIONS: tl.constexpr):
    """Of K + 1 tokens to emit all but the next token: the accepted of K loaded drafts, and padding."""
    i = tl.arange(0, POSITIONS)
    tl.store(emitted + i, tl.where(i < n, tokens.to(tl.int64), pad), mask=(i <= K) & (i != n))


@triton.jit
def write_token(next_token, emitted, bonus_tokens, n, length, token, is_it):
    """The next token: the one of these, or none, that is it; or the bonus token."""
    if bonus_tokens is not None:
        token = tl.where(n < length, token, tl.load(bonus_tokens).to(tl.int64))
    tl.store(next_token + token * 0, token, mask=is_it)
    if emitted is not None:
        tl.store(emitted + n + token * 0, token, mask=is_it)


# One compiled kernel serves every shape: no argument's value makes another, and ALIGNED says what the compiler may assume.
UNSPECIALIZED = [
    "draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample", "seed", "offset", "lengths", "cu_drafts",
    "greedy", "bonus_tokens", "scratch", "bests", "accepted", "next_token", "num_emitted", "emitted", "pad", "K", "T",
    "V_draft", "V", "chunks", "programs", "stride_draft_b", "stride_draft_k", "stride_target_b", "stride_target_k",
    "stride_emitted",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sum_chunks(draft_tokens, draft_probs, target_probs, uniform_accept, seed, offset, lengths, cu_drafts, greedy,
               bonus_tokens, scratch, bests, K, T, V_draft, V, chunks, stride_draft_b, stride_draft_k, stride_target_b,
               stride_target_k, FLOAT64: tl.constexpr, POSITIONS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
               SEGMENT: tl.constexpr, LIMBS: tl.constexpr, CHUNKS: tl.constexpr, MIXED: tl.constexpr, wait: tl.constexpr,
               release: tl.constexpr):
    """grid (B, ceil(chunks / CHUNKS), 1): each program finds the refused position, and sums CHUNKS chunks of its row pair.

    Without randomness every sequence is greedy, and the third dimension may be as many as K + 1. `bests` is the scratch of
    greedy sequences, of each row that there is. MIXED says whether chunks take their sequences in orders of their own.
    """
    if wait is not None:
        wait()
    b = tl.program_id(0)
    c = tl.program_id(1)
    if MIXED:  # a processor gets every n-th program: not of few sequences, since some read two rows and some one
        b ^= c & ((tl.num_programs(0) & -tl.num_programs(0)) - 1)
    b = b.to(tl.int64)
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    bests += rows_before(b, start, bonus_tokens) * 2 * tl.num_programs(1)
    target_row = first_row(b, rows_before(b, start, bonus_tokens), stride_target_b, stride_target_k, cu_drafts)
    is_greedy = tl.full((), 0, tl.int1)
    if greedy is not None:
        is_greedy = tl.load(greedy + b) != 0
    if uniform_accept is None and seed is None:  # known to the compiler, unlike the next
        largest_entries(target_probs + target_row, bests, bonus_tokens, length, V, stride_target_k, ALIGNED, CHUNK, SEGMENT,
                        CHUNKS, LIMBS)
    elif is_greedy:
        largest_entries(target_probs + target_row, bests, bonus_tokens, length, V, stride_target_k, ALIGNED, CHUNK, SEGMENT,
                        CHUNKS, LIMBS)
    else:
        if seed is not None:
            seed += b
            offset += b
        draft_row = first_row(b, start, stride_draft_b, stride_draft_k, cu_drafts)
        if cu_drafts is None:
            n, token = first_refused(draft_tokens, draft_probs, target_probs, uniform_accept, seed, offset, start, draft_row,
                                     target_row, K, length, V_draft, V, stride_draft_k, stride_target_k, FLOAT64,
                                     POSITIONS)
        else:  # where every sequence has K drafts, b's are from b * K on: try that while cu_drafts is on its way
            guess = b * K
            exist = tl.maximum(tl.minimum(K, T - guess), 0).to(tl.int32)
            n, token = first_refused(draft_tokens, draft_probs, target_probs, uniform_accept, seed, offset, guess,
                                     guess * stride_draft_k, rows_before(b, guess, bonus_tokens) * stride_target_k, exist,
                                     length, V_draft, V, stride_draft_k, stride_target_k, FLOAT64, POSITIONS)
            if start != guess:
                n, token = first_refused(draft_tokens, draft_probs, target_probs, uniform_accept, seed, offset, start,
                                         draft_row, target_row, length, length, V_draft, V, stride_draft_k,
                                         stride_target_k, FLOAT64, POSITIONS)
        row, V = row_to_draw_from(target_row + n * stride_target_k, V, n, length, bonus_tokens)
        target_probs += row
        if draft_probs is not None:
            draft_probs += tl.where(token < 0, 0, draft_row + n * stride_draft_k)  # past the last draft is no row

        scratch += b * (HEADER + even(chunks))
        chunk = c * CHUNKS + tl.arange(0, CHUNKS)
        if release is not None:
            release()  # not before: locate's programs would take room, and have nothing to do yet
        sums = chunk_sums(draft_probs, target_probs, chunk, token, V_draft, V, ALIGNED, CHUNK, SEGMENT, LIMBS)
        tl.store(scratch + HEADER + chunk, sums, mask=chunk < even(chunks))  # one past the last is 0
        if c == 0:
            tl.store(scratch, n)
            tl.store(scratch + 1, token.to(tl.int64))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def locate(draft_tokens, draft_probs, target_probs, uniform_sample, seed, offset, lengths, cu_drafts, greedy, bonus_tokens,
           scratch, bests, accepted, next_token, num_emitted, emitted, K, T, V_draft, V, chunks, programs, stride_draft_b,
           stride_draft_k, stride_target_b, stride_target_k, stride_emitted, FLOAT64: tl.constexpr, PURPOSE: tl.constexpr,
           POSITIONS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, LIMBS: tl.constexpr, CAPACITY: tl.constexpr,
           wait: tl.constexpr):
    """grid (B,): find the chunk that holds the threshold among at most CAPACITY sums, and the entry in it.

    What does not depend on the first kernel, the draws' bits and the drafts to emit, is loaded before that has ended (where
    limbs are summed launches never overlap, and the bits of one draw are fewer).
    """
    ALL_GREEDY: tl.constexpr = uniform_sample is None and seed is None
    EARLY: tl.constexpr = not (LIMBS or (ALL_GREEDY or POSITIONS > 256))  # the bits of more draws fit no registers
    b = tl.program_id(0).to(tl.int64)
    scratch += b * (HEADER + even(chunks))
    next_token += b
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    if bonus_tokens is not None:
        bonus_tokens += b
    position = tl.arange(0, POSITIONS)
    if seed is not None:
        seed += b
        offset += b
    elif not ALL_GREEDY:
        uniform_sample += start + b
    if EARLY:
        u = bits_of_draw(uniform_sample, seed, offset, position, position <= length, FLOAT64, PURPOSE)
    is_greedy = tl.full((), ALL_GREEDY, tl.int1)
    if greedy is not None:
        is_greedy = tl.load(greedy + b) != 0
    if emitted is not None:
        emitted += b * stride_emitted
        tokens = tl.load(draft_tokens + start + position, mask=position < length, other=0)
    i = tl.arange(0, CAPACITY)
    one = tl.arange(0, 1)
    if wait is not None:
        wait()
    if is_greedy:
        draft_tokens += start
        bests += rows_before(b, start, bonus_tokens) * 2 * programs
        n, largest = follow_largest(draft_tokens, bests, bonus_tokens, length, programs, CAPACITY)
        write_token(next_token, emitted, bonus_tokens, n, length, largest + one, one == 0)
    else:
        n = tl.load(scratch)
        token = tl.load(scratch + 1).to(tl.int32)
        sums = tl.load(tl.multiple_of(scratch + HEADER, 16) + i, mask=i < even(chunks), other=0)
        row = first_row(b, rows_before(b, start, bonus_tokens), stride_target_b, stride_target_k, cu_drafts)
        row, V = row_to_draw_from(row + n * stride_target_k, V, n, length, bonus_tokens)
        target_probs += row
        if draft_probs is not None:
            draft_row = first_row(b, start, stride_draft_b, stride_draft_k, cu_drafts) + n * stride_draft_k
            draft_probs += tl.where(token < 0, 0, draft_row)

        if EARLY:
            drawn, _ = sum_both(tl.where(position == n, u, 0), position, LIMBS)
        elif ALL_GREEDY:
            drawn = n
        else:
            drawn = bits_of_draw(uniform_sample, seed, offset, n, n >= 0, FLOAT64, PURPOSE)
        total, _ = sum_both(sums, i, LIMBS)
        cumulative = tl.cumsum(sums, 0)
        if (total == 0) & (token >= 0):  # rare: the residual has no mass, so the draw is from the target row
            token = tl.full((), -1, tl.int32)
            for c in range(0, chunks):
                mass = tl.sum(chunk_sums(None, target_probs, c + one, token, V_draft, V, ALIGNED, CHUNK, CHUNK, LIMBS))
                sums += tl.where(i == c, mass, 0)
                cumulative += tl.where(i >= c, mass, 0)
                total += mass

        threshold = scale(drawn, total)
        is_before = cumulative <= threshold
        if LIMBS:
            before, chunk = sum_both(tl.where(is_before, sums, 0), is_before.to(tl.int32), LIMBS)
        else:
            chunk = tl.sum(is_before.to(tl.int32), 0)
        chunk = tl.where(total > 0, chunk, 0)
        entry = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        p, q = row_pair(draft_probs, target_probs, entry, token, V_draft, V, ALIGNED, LIMBS)
        if not LIMBS:  # while the chunk is on its way
            before = tl.sum(tl.where(is_before, sums, 0), 0)
        running, mass = running_sums(p, q, LIMBS)
        running -= threshold - before
        if LIMBS:  # counted, since what follows spills on some Intel GPUs
            found = tl.where(total > 0, chunk * CHUNK + tl.sum((running <= 0).to(tl.int32)), 0)
            write_token(next_token, emitted, bonus_tokens, n, length, found.to(tl.int64) + one, one == 0)
        else:  # by the lane that has it
            is_it = (running - 1).to(tl.uint64) < mass.to(tl.uint64)  # 0 < running <= mass
            is_it |= entry == tl.where(total > 0, -1, 0)  # token 0 of a row without mass
            GROUP: tl.constexpr = 1 if not ALIGNED else 4 if CHUNK >= 512 else 2  # what a lane of 4 warps has read at once
            found = tl.max(tl.reshape(tl.where(is_it, entry, -1), (CHUNK // GROUP, GROUP)), 1)
            write_token(next_token, emitted, bonus_tokens, n, length, found.to(tl.int64), found >= 0)
    tl.store(accepted + b, n)
    if num_emitted is not None:
        tl.store(num_emitted + b, n + 1)
    if emitted is not None:
        write_others(emitted, tokens, n, -1, K, POSITIONS)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def write_tokens(draft_tokens, accepted, next_token, emitted, pad, K, stride_emitted, POSITIONS: tl.constexpr):
    """grid (B,): what a step adds to each sequence."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, POSITIONS)
    n = tl.minimum(tl.maximum(tl.load(accepted + b), 0), K)
    tokens = tl.load(draft_tokens + b * K + i, mask=i < K, other=0)
    emitted += b * stride_emitted
    write_others(emitted, tokens, n, pad, K, POSITIONS)
    tl.store(emitted + n, tl.load(next_token + b))
