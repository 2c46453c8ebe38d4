"""The rule from logits in four Triton launches: weigh the blocks of all rows, test the drafts, sum the residual, draw.

Device code only. A row's scratch is three arrays with an entry for each of its blocks: the maximum; the sum of weights, later
the share of 2**44; and what turns weights to shares, a factor and above its 32 bits a shift. Of a greedy sequence's rows the first
two are the largest entry and its place. Behind the rows stands a verdict for each of the target's: -1 where the draft is
accepted, else its probability, or of a greedy sequence the argmax; and behind those the residual sums, block by block.
"""

import triton
import triton.language as tl

from .kernels import bits_of_draw, drafts_of, even, first_row, load_entries, write_others, write_token
from .numbers import apportion_to_blocks, bits, order, random_bits, scale, scale_of, share, weigh

ACCEPT = tl.constexpr(0)  # rule.ACCEPT
BLOCK = tl.constexpr(1024)  # rule.BLOCK
LAST = tl.constexpr(0x7FFFFFFF)
LOW_32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def load_block(row, block, V, ALIGNED: tl.constexpr, LIMBS: tl.constexpr):
    """Logits of a block of a row, -inf past its end: [1, BLOCK] float32."""
    v = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    if LIMBS:
        x, exists = load_entries(row, v, V, ALIGNED, LIMBS)
        return tl.where(exists, x.to(tl.float32), float("-inf"))
    pointers = row + v
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (1, 16))
        V = V // 16 * 16  # which is itself, and tells the compiler
    return tl.load(pointers, mask=v < V, other=float("-inf")).to(tl.float32)


@triton.jit
def temperature_of(temperature, greedy, b):
    """(temperature, whether the sequence is greedy)"""
    T = tl.full((), 1.0, tl.float32)
    is_greedy = tl.full((), 0, tl.int1)
    if temperature is not None:
        T = tl.load(temperature + b)
        is_greedy = (T > 0) == 0  # NaN too
    if greedy is not None:
        is_greedy = is_greedy | (tl.load(greedy + b) != 0)
    return T, is_greedy


@triton.jit
def words_of(scratch, row, blocks):
    """A row's scratch."""
    return scratch + row * (3 * even(blocks))


@triton.jit
def verdicts_of(scratch, rows, blocks):
    """Where the verdicts are, behind the rows."""
    return words_of(scratch, rows, blocks)


@triton.jit
def rows_of(draft, T):
    """(rows of the target, rows in all)"""
    target_rows = T.to(tl.int64) + tl.num_programs(0)
    if draft is None:
        return target_rows, target_rows
    else:
        return target_rows, target_rows + T


@triton.jit
def summarize(x, words, block, blocks, T, is_greedy, LIMBS: tl.constexpr):
    """Write what is known of one block's logits x [1, BLOCK] alone."""
    if is_greedy:
        key = order(x)
        top = tl.max(key)
        place = tl.min(tl.where(key == top, block * BLOCK + tl.arange(0, BLOCK)[None, :], LAST))
        tl.store(words + block, top.to(tl.int64))
        tl.store(words + even(blocks) + block, place.to(tl.int64))
    else:
        m = tl.max(x)
        m = tl.where(m == m, m, float("-inf"))
        tl.store(words + block, m.to(tl.int32, bitcast=True).to(tl.int64))
        tl.store(words + even(blocks) + block, tl.sum(weigh(x, m, scale_of(T, LIMBS))))


@triton.jit
def share_row(words, blocks, scale_by, CAPACITY: tl.constexpr):
    """Give a row's blocks their shares, once all are summarized: writes them, and returns what `at_block` takes."""
    i = tl.arange(0, CAPACITY)
    exists = i < blocks
    maxima = tl.load(words + i, mask=exists, other=-0x800000).to(tl.int32).to(tl.float32, bitcast=True)  # -inf
    words += even(blocks)
    sums = tl.load(words + i, mask=exists, other=0)
    masses, factor, shift = apportion_to_blocks(maxima, sums, scale_by)
    tl.store(words + i, masses, mask=exists)
    tl.store(words + even(blocks) + i, shift << 32 | factor, mask=exists)
    return maxima, masses, factor, shift


@triton.jit
def shares_at(x, block, maxima, masses, factor, shift, scale_by, CAPACITY: tl.constexpr):
    """The probabilities of a block's logits x, from what share_row returned."""
    here = tl.arange(0, CAPACITY) == block
    m = tl.max(tl.where(here, maxima, float("-inf")), 0)
    mass, factor, shift = tl.sum(tl.where(here, masses, 0)), tl.sum(tl.where(here, factor, 0)), tl.sum(tl.where(here, shift, 0))
    return share(x, block * BLOCK + tl.arange(0, BLOCK)[None, :], m, mass, factor, shift, scale_by)


@triton.jit
def shares_of(x, words, block, blocks, scale_by):
    """The probabilities of a block's logits x, from what share_row wrote."""
    m = tl.load(words + block).to(tl.int32).to(tl.float32, bitcast=True)
    words += even(blocks) + block
    mass = tl.load(words)
    packed = tl.load(words + even(blocks))
    v = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    return share(x, v, m, mass, packed & LOW_32, packed >> 32, scale_by)


@triton.jit
def largest_block_of(words, blocks, CAPACITY: tl.constexpr):
    """The argmax of a greedy sequence's row."""
    i = tl.arange(0, CAPACITY)
    best = tl.load(words + i, mask=i < blocks, other=-0x8000000000000000)
    place = tl.load(words + even(blocks) + i, mask=i < blocks, other=LAST)
    return tl.min(tl.where(best == tl.max(best, 0), place, LAST), 0)


@triton.jit
def end_of(verdicts, tokens, length, V_draft, POSITIONS: tl.constexpr):
    """(n, verdict, token): the first position not accepted, its verdict, and the draft refused there, -1 if there is none.

    Loaded tokens are those of POSITIONS, -1 past the last.
    """
    i = tl.arange(0, POSITIONS)
    verdict = tl.load(verdicts + i, mask=i <= length, other=-1)
    n = tl.min(tl.where(verdict >= 0, i, LAST), 0)
    token = tl.sum(tl.where(i == n, tokens, 0), 0)
    token = tl.where(token.to(tl.uint64) < V_draft.to(tl.uint64), token, -1).to(tl.int32)
    return n.to(tl.int64), tl.sum(tl.where(i == n, verdict, 0), 0), token


@triton.jit
def residual(x, y, words, draft_words, block, blocks, token, scale_by):
    """max(0, p - q) of a block's logits x of the target and y of the draft, or p where no draft was refused."""
    p = shares_of(x, words, block, blocks, scale_by)
    if draft_words is None:
        return tl.where(block * BLOCK + tl.arange(0, BLOCK)[None, :] == token, 0, p)
    else:
        q = shares_of(y, draft_words, block, blocks, scale_by)
        return tl.where(token < 0, p, tl.maximum(p - q, 0))


# As in kernels.py, one compiled kernel serves every shape.
UNSPECIALIZED = [
    "draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample", "seed", "offset", "lengths", "cu_drafts",
    "greedy", "temperature", "scratch", "accepted", "next_token", "emitted", "K", "T", "V_draft", "V", "blocks",
    "stride_draft_b", "stride_draft_k", "stride_target_b", "stride_target_k", "stride_emitted",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def weigh_blocks(draft_probs, target_probs, lengths, cu_drafts, greedy, temperature, scratch, K, T, V_draft, V, blocks,
                 stride_draft_b, stride_draft_k, stride_target_b, stride_target_k, ALIGNED: tl.constexpr, LIMBS: tl.constexpr,
                 release: tl.constexpr):
    """grid (B, blocks, K + 1 rows of the target and K of the draft): each program summarizes a block of a row."""
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.program_id(2)
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    target_rows, _ = rows_of(draft_probs, T)
    if release is not None:
        release()
    if row <= K:
        if row <= length:
            target_probs += first_row(b, start + b, stride_target_b, stride_target_k, cu_drafts)
            x = load_block(target_probs + row.to(tl.int64) * stride_target_k, block, V, ALIGNED, LIMBS)
            heat, is_greedy = temperature_of(temperature, greedy, b)
            summarize(x, words_of(scratch, start + b + row, blocks), block, blocks, heat, is_greedy, LIMBS)
    elif draft_probs is not None:
        row -= K + 1
        if row < length:
            draft_probs += first_row(b, start, stride_draft_b, stride_draft_k, cu_drafts)
            x = load_block(draft_probs + row.to(tl.int64) * stride_draft_k, block, V_draft, ALIGNED, LIMBS)
            heat, is_greedy = temperature_of(temperature, greedy, b)
            summarize(x, words_of(scratch, target_rows + start + row, blocks), block, blocks, heat, is_greedy, LIMBS)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def test_drafts(draft_tokens, draft_probs, target_probs, uniform_accept, seed, offset, lengths, cu_drafts, greedy,
                temperature, scratch, K, T, V_draft, V, blocks, stride_draft_b, stride_draft_k, stride_target_b,
                stride_target_k, FLOAT64: tl.constexpr, ALIGNED: tl.constexpr, LIMBS: tl.constexpr, CAPACITY: tl.constexpr,
                wait: tl.constexpr, release: tl.constexpr):
    """grid (B, K + 1): each program shares out the rows of a position, and tests its draft."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    target_rows, rows = rows_of(draft_probs, T)
    token = tl.load(draft_tokens + start + i, mask=i < length, other=-1)
    is_known = (token.to(tl.uint64) < V_draft.to(tl.uint64)) & (token < V)
    t = tl.where(is_known, token, 0).to(tl.int32)
    block = t // BLOCK
    if seed is None:
        u = bits(tl.load(uniform_accept + start + i, mask=i < length, other=0), FLOAT64)
    else:
        u = random_bits(tl.load(seed + b), tl.load(offset + b), i, ACCEPT)
    heat, is_greedy = temperature_of(temperature, greedy, b)
    target_probs += first_row(b, start + b, stride_target_b, stride_target_k, cu_drafts) + i.to(tl.int64) * stride_target_k
    x = load_block(target_probs, block, tl.where(i <= length, V, 0), ALIGNED, LIMBS)
    y = x
    if draft_probs is not None:
        draft_probs += first_row(b, start, stride_draft_b, stride_draft_k, cu_drafts) + i.to(tl.int64) * stride_draft_k
        y = load_block(draft_probs, block, tl.where(i < length, V_draft, 0), ALIGNED, LIMBS)
    words = words_of(scratch, start + b + i, blocks)
    verdicts = verdicts_of(scratch, rows, blocks) + start + b + i
    v = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    if release is not None:
        release()
    if wait is not None:
        wait()
    if i <= length:
        if is_greedy:
            best = largest_block_of(words, blocks, CAPACITY)
            tl.store(verdicts, tl.where((i < length) & (token == best), -1, best))
        else:
            scale_by = scale_of(heat, LIMBS)
            maxima, masses, factor, shift = share_row(words, blocks, scale_by, CAPACITY)
            p = tl.sum(tl.where(v == t, shares_at(x, block, maxima, masses, factor, shift, scale_by, CAPACITY), 0))
            q = p * 0 + 17592186044416  # 2**44: a draft without probabilities is certain
            if draft_probs is not None:
                if i < length:
                    draft_words = words_of(scratch, target_rows + start + i, blocks)
                    maxima, masses, factor, shift = share_row(draft_words, blocks, scale_by, CAPACITY)
                    q = tl.sum(tl.where(v == t, shares_at(y, block, maxima, masses, factor, shift, scale_by, CAPACITY), 0))
            tl.store(verdicts, tl.where(is_known & (scale(u, q) < p), -1, tl.where(is_known, p, 0)))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sum_residual(draft_tokens, draft_probs, target_probs, lengths, cu_drafts, greedy, temperature, scratch, K, T, V_draft, V,
                 blocks, stride_draft_b, stride_draft_k, stride_target_b, stride_target_k, POSITIONS: tl.constexpr,
                 ALIGNED: tl.constexpr, LIMBS: tl.constexpr, wait: tl.constexpr, release: tl.constexpr):
    """grid (B, blocks): each program sums a block of the row that the token is drawn from."""
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    target_rows, rows = rows_of(draft_probs, T)
    position = tl.arange(0, POSITIONS)
    tokens = tl.load(draft_tokens + start + position, mask=position < length, other=-1)
    heat, is_greedy = temperature_of(temperature, greedy, b)
    verdicts = verdicts_of(scratch, rows, blocks)
    sums = verdicts + target_rows + b * even(blocks)
    if release is not None:
        release()
    if wait is not None:
        wait()
    if is_greedy == 0:
        n, verdict, token = end_of(verdicts + start + b, tokens, length, V_draft, POSITIONS)
        words = words_of(scratch, start + b + n, blocks)
        if draft_probs is None:
            mass = tl.load(words + even(blocks) + block)  # without what the refused token has of it
            tl.store(sums + block, mass - tl.where((token >= 0) & (token // BLOCK == block), verdict, 0))
        elif token < 0:
            tl.store(sums + block, tl.load(words + even(blocks) + block))
        else:
            target_probs += first_row(b, start + b, stride_target_b, stride_target_k, cu_drafts) + n * stride_target_k
            draft_probs += first_row(b, start, stride_draft_b, stride_draft_k, cu_drafts) + n * stride_draft_k
            x = load_block(target_probs, block, V, ALIGNED, LIMBS)
            y = load_block(draft_probs, block, V_draft, ALIGNED, LIMBS)
            draft_words = words_of(scratch, target_rows + start + n, blocks)
            tl.store(sums + block, tl.sum(residual(x, y, words, draft_words, block, blocks, token, scale_of(heat, LIMBS))))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def draw(draft_tokens, draft_probs, target_probs, uniform_sample, seed, offset, lengths, cu_drafts, greedy, temperature,
         scratch, accepted, next_token, emitted, K, T, V_draft, V, blocks, stride_draft_b, stride_draft_k, stride_target_b,
         stride_target_k, stride_emitted, FLOAT64: tl.constexpr, PURPOSE: tl.constexpr, POSITIONS: tl.constexpr,
         ALIGNED: tl.constexpr, LIMBS: tl.constexpr, CAPACITY: tl.constexpr, wait: tl.constexpr):
    """grid (B,): find the block that holds the threshold among at most CAPACITY sums, and the entry in it."""
    b = tl.program_id(0).to(tl.int64)
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    target_rows, rows = rows_of(draft_probs, T)
    position = tl.arange(0, POSITIONS)
    tokens = tl.load(draft_tokens + start + position, mask=position < length, other=-1)
    heat, is_greedy = temperature_of(temperature, greedy, b)
    if seed is not None:
        seed += b
        offset += b
    else:
        uniform_sample += start + b
    verdicts = verdicts_of(scratch, rows, blocks)
    sums = verdicts + target_rows + b * even(blocks)
    next_token += b
    if emitted is not None:
        emitted += b * stride_emitted
    one = tl.arange(0, 1)
    if wait is not None:
        wait()
    n, verdict, token = end_of(verdicts + start + b, tokens, length, V_draft, POSITIONS)
    if is_greedy:
        write_token(next_token, emitted, n, verdict + one, one == 0)
    else:
        i = tl.arange(0, CAPACITY)
        mass = tl.load(sums + i, mask=i < blocks, other=0)
        u = bits_of_draw(uniform_sample, seed, offset, n, n >= 0, FLOAT64, PURPOSE)
        cumulative = tl.cumsum(mass, 0)
        total = tl.sum(mass, 0)
        threshold = scale(u, total)
        is_before = cumulative <= threshold
        before = tl.sum(tl.where(is_before, mass, 0), 0)
        block = tl.where(total > 0, tl.sum(is_before.to(tl.int32), 0), 0)
        target_probs += first_row(b, start + b, stride_target_b, stride_target_k, cu_drafts) + n * stride_target_k
        x = load_block(target_probs, block, V, ALIGNED, LIMBS)
        words = words_of(scratch, start + b + n, blocks)
        if draft_probs is None:
            w = residual(x, x, words, None, block, blocks, token, scale_of(heat, LIMBS))
        else:
            draft_row = first_row(b, start, stride_draft_b, stride_draft_k, cu_drafts) + n * stride_draft_k
            draft_probs += tl.where(token < 0, 0, draft_row)  # past the last draft is no row
            y = load_block(draft_probs, block, tl.where(token < 0, 0, V_draft), ALIGNED, LIMBS)
            draft_words = words_of(scratch, tl.where(token < 0, start + b + n, target_rows + start + n), blocks)
            w = residual(x, y, words, draft_words, block, blocks, token, scale_of(heat, LIMBS))
        running = tl.cumsum(w, 1) - (threshold - before)
        found = tl.where(total > 0, block * BLOCK + tl.sum((running <= 0).to(tl.int32)), 0)
        write_token(next_token, emitted, n, found.to(tl.int64) + one, one == 0)
    tl.store(accepted + b, n)
    if emitted is not None:
        write_others(emitted, tokens, n, -1, K, POSITIONS)
