"""The rule from logits in four Triton launches: weigh all blocks, share out all rows, sum the residual, draw.

Without a draft's rows there is no residual to sum, and three do. Where there is work enough, the first two are launched in
stages, for a few positions each, and later ones leave out sequences of which a draft has been refused: no row behind it counts.

Device code only. A row's scratch is three arrays with an entry for each of its blocks: the maximum; the sum of weights, later
the share of 2**44; and what turns weights to shares, a factor and above its 32 bits a shift. Of a greedy sequence's rows the
first two are the largest entry and its place. Behind the rows stand a number for each of the target's, the chance: its draft's
probability, or of a greedy sequence the argmax; and a number for each draft, the bar: what its chance must be above, so that it
is accepted. And behind those for each sequence what is found of it: accepted, the refused draft or -1 (of a greedy sequence the
next token), and with a draft's rows the sums of blocks, and what shares leave there (see pack_rests).
"""

import triton
import triton.language as tl

from ..rule import BLOCK as RULE_BLOCK
from .kernels import (
    ACCEPT,
    HEADER,
    bits_of_draw,
    drafts_of,
    even,
    first_row,
    has_row,
    largest_of_row,
    load_entries,
    rows_before,
    write_others,
    write_token,
)
from .numbers import (
    LARGEST_WEIGHT,
    apportion_to_blocks,
    bits,
    first_largest,
    give_rest,
    is_largest,
    left_of,
    order,
    quotient,
    random_bits,
    running_sum,
    scale,
    scale_of,
    share,
    total_of,
    weigh,
    weigh_finite,
)

BLOCK = tl.constexpr(RULE_BLOCK)
LAST = tl.constexpr(0x7FFFFFFF)
LEAST = tl.constexpr(-0x80000000)
LOW_32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def load_logits(row, v, V, ALIGNED: tl.constexpr, LIMBS: tl.constexpr):
    """Logits v [n, m] of a row, -inf past its end: float32."""
    x, exists = load_entries(row, v, V, ALIGNED, LIMBS, float("-inf"))
    x = x.to(tl.float32)
    if LIMBS:
        x = tl.where(exists, x, float("-inf"))
    return x


@triton.jit
def load_block(row, block, V, ALIGNED: tl.constexpr, LIMBS: tl.constexpr):
    """Logits of a block of a row: [1, BLOCK]."""
    return load_logits(row, block * BLOCK + tl.arange(0, BLOCK)[None, :], V, ALIGNED, LIMBS)


@triton.jit
def largest_logit(x):
    """-inf where all are NaN."""
    m = tl.max(x)
    return tl.where(m == m, m, float("-inf"))


@triton.jit
def temperature_of(temperature, fields, greedy, b):
    """(temperature, whether the sequence is greedy). The fields of one for all are given where there is no tensor."""
    if temperature is not None:
        fields = tl.load(temperature + b).to(tl.int32, bitcast=True)
    is_greedy = (fields <= 0) | (fields > 0x7F800000)  # a subnormal is above 0, also where it is taken for that; NaN is not
    if greedy is not None:
        is_greedy = is_greedy | (tl.load(greedy + b) != 0)
    return fields.to(tl.float32, bitcast=True), is_greedy


@triton.jit
def temperature_of_draft(draft_temperature, heat, b):
    """That of a sequence's draft, given the target's."""
    if draft_temperature is None:
        return heat
    else:
        return tl.load(draft_temperature + b)


@triton.jit
def first_draft_row(b, start, stride_draft_b, stride_draft_k, cu_drafts, draft_slots, S):
    """Where the draft's rows of sequence b begin: in its slot of S, if they are kept in slots."""
    if draft_slots is None:
        return first_row(b, start, stride_draft_b, stride_draft_k, cu_drafts)
    else:
        return tl.minimum(tl.maximum(tl.load(draft_slots + b).to(tl.int64), 0), S - 1) * stride_draft_b


@triton.jit
def words_of(scratch, row, blocks):
    """A row's scratch."""
    return scratch + row * (3 * even(blocks))


@triton.jit
def places_of(draft, scratch, b, K, T, blocks):
    """Of sequence b in scratch: its first row of the target and of the draft (which has none without `draft`), as numbers of
    rows; and where its chances are, its bars, and what is found of it.

    Sequences whose offsets overlap share rows of logits, and none of scratch.
    """
    K = tl.minimum(tl.cast(K, tl.int64), T)
    target_rows = tl.num_programs(0) * (K + 1)
    rows = target_rows + tl.num_programs(0) * K
    own = b * (K + 1)
    own_draft = target_rows + b * K
    chances = words_of(scratch, target_rows if draft is None else rows, blocks)
    return own, own_draft, chances + own, chances + own_draft, chances + rows + b * (HEADER + 2 * even(blocks))


@triton.jit
def summarize(row, words, first, count, blocks, V, T, is_greedy, ALIGNED: tl.constexpr, LIMBS: tl.constexpr):
    """Write what is known of each of `count` blocks of a row alone."""
    last = tl.minimum(first + count, blocks)
    if is_greedy:
        for block in range(first, last):
            v = block * BLOCK + tl.arange(0, BLOCK)[None, :]
            key = tl.where(v < V, order(load_block(row, block, V, ALIGNED, LIMBS)), LEAST)
            top = tl.max(key)
            tl.store(words + block, top.to(tl.int64))
            tl.store(words + even(blocks) + block, tl.min(tl.where(key == top, v, LAST)).to(tl.int64))
    else:
        scale_by = scale_of(T, LIMBS)
        top = float("-inf")
        for block in range(first, last):
            x = load_block(row, block, V, ALIGNED, LIMBS)
            m = largest_logit(x)
            top = tl.maximum(top, m)
            tl.store(words + block, m.to(tl.int32, bitcast=True).to(tl.int64))
            tl.store(words + even(blocks) + block, total_of(weigh_finite(x, m, scale_by), LIMBS))
        if top == float("inf"):  # rare, so blocks with infinities are read again rather than kept above
            for block in range(first, last):
                count = tl.sum((load_block(row, block, V, ALIGNED, LIMBS) == top).to(tl.int32))
                if count > 0:
                    tl.store(words + even(blocks) + block, count.to(tl.int64) * LARGEST_WEIGHT)


@triton.jit
def shares_of(x, m, mass, factor, shift, scale_by, LIMBS: tl.constexpr):
    """As give_rest, of a block's logits x, from its maximum, its share, and what turns weights to shares."""
    w = weigh(x, m, scale_by)
    return give_rest(share(w, factor, shift, LIMBS), w, mass)


@triton.jit
def load_facts(words, block, blocks):
    """A block's maximum, its share, and what turns weights to shares, as share_rows wrote them."""
    m = tl.load(words + block).to(tl.int32).to(tl.float32, bitcast=True)
    words += even(blocks) + block
    mass = tl.load(words)
    packed = tl.load(words + even(blocks))
    return m, mass, packed & LOW_32, packed >> 32


@triton.jit
def end_of(tokens, chances, bars, length, is_greedy, POSITIONS: tl.constexpr, wait: tl.constexpr):
    """The first of `length` positions whose draft is not accepted, or length, by the numbers that share_rows wrote."""
    i = tl.arange(0, POSITIONS)
    exists = i < length
    t = tl.load(tokens + i, mask=exists, other=-1)
    if wait is not None:
        wait()
    p = tl.load(chances + i, mask=exists, other=0)
    bar = tl.load(bars + i, mask=exists, other=0)
    stands = tl.where(is_greedy, t == p, bar < p)
    return tl.min(tl.where(exists & stands, LAST, i), 0).to(tl.int64)


@triton.jit
def all_stand(tokens, chances, bars, length, position, is_greedy, POSITIONS: tl.constexpr, wait: tl.constexpr):
    """Whether the drafts before `position` do. Where one was refused no row counts from there on."""
    stand = position == 0
    if position > 0:
        n = end_of(tokens, chances, bars, tl.minimum(length, position), is_greedy, POSITIONS, wait)
        stand = n == position
    return stand


@triton.jit
def refused_draft(tokens, n, length, V_draft):
    """The draft at n, where drafts end, or -1 if there is none."""
    token = tl.load(tokens + n, mask=n < length, other=-1)
    return tl.where(token.to(tl.uint64) < V_draft.to(tl.uint64), token, -1).to(tl.int32)


@triton.jit
def is_certain(is_greedy, n, length, bonus_tokens):
    """Whether no chance draws the next token of a sequence whose drafts end at n."""
    if bonus_tokens is None:
        return is_greedy
    else:
        return is_greedy | (n == length)


@triton.jit
def pack_rests(i, rest, j, draft_rest):
    """What the shares p and q of a block leave, less than 2**20, and the places that get it, in a word for `draw`."""
    places = tl.minimum(i, BLOCK) | tl.minimum(j, BLOCK) << 11
    return draft_rest << 42 | rest << 22 | places.to(tl.int64)


@triton.jit
def unpack_rests(word):
    """(i, rest, j, draft_rest) of pack_rests, a place being BLOCK where there is none."""
    return word & 2047, word >> 22 & 0xFFFFF, word >> 11 & 2047, word >> 42


@triton.jit
def sum_of_loaded(x, y, words, draft_words, block, blocks, scale_by, draft_scale_by, LIMBS: tl.constexpr):
    """The sum of max(0, p - q) of a block's logits x of the target and y of the draft; and its pack_rests."""
    m, mass, factor, shift = load_facts(words, block, blocks)
    p, i, rest = shares_of(x, m, mass, factor, shift, scale_by, LIMBS)
    m, mass, factor, shift = load_facts(draft_words, block, blocks)
    q, j, draft_rest = shares_of(y, m, mass, factor, shift, draft_scale_by, LIMBS)
    return total_of(tl.maximum(p - q, 0), LIMBS), pack_rests(i, rest, j, draft_rest)


@triton.jit
def share_at(row, v, V, m, factor, shift, scale_by):
    """The share of the entry v of a row, without what the block's shares leave; 0 past its end."""
    x = tl.load(row + tl.minimum(v, V - 1)).to(tl.float32)
    return share(weigh(tl.where(v < V, x, float("-inf")), m, scale_by), factor, shift, False)


@triton.jit
def along(x):
    """Sums of rows [n, m], which are each of one thread: [n, 1]."""
    return tl.sum(x, 1)[:, None]


@triton.jit
def sum_of_shares(target, draft, m, mass, factor, shift, draft_m, draft_mass, draft_factor, draft_shift, V, V_draft, scale_by,
                  draft_scale_by, weigh_by: tl.constexpr, ALIGNED: tl.constexpr, SEGMENT: tl.constexpr, WIDTH: tl.constexpr):
    """Of a block's shares p and q: the sum of max(0, p - q); what p leaves, and where the first of the largest is, or LAST;
    and the same of q.
    """
    entries = tl.arange(0, SEGMENT // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = along(tl.zeros_like(entries).to(tl.int64))
    ps = along(tl.zeros_like(entries))
    qs = ps
    i = tl.zeros_like(entries) + LAST
    j = i
    for behind in range(SEGMENT, BLOCK + 1, SEGMENT):  # from the last on, so that the first place is what stays
        start = BLOCK - behind
        x = load_logits(target, start + entries, V, ALIGNED, False)
        y = load_logits(draft, start + entries, V_draft, ALIGNED, False)
        w = weigh_by(x, m, scale_by)
        p = share(w, factor, shift, False)
        i = tl.where(is_largest(w), start, i)
        w = weigh_by(y, draft_m, draft_scale_by)
        q = share(w, draft_factor, draft_shift, False)
        j = tl.where(is_largest(w), start, j)
        total += along(tl.maximum(p - q, 0))
        ps += along(p.to(tl.int32))
        qs += along(q.to(tl.int32))
    i = tl.min(tl.where(i < LAST, i + entries, LAST))
    j = tl.min(tl.where(j < LAST, j + entries, LAST))
    return tl.sum(total), left_of(mass, ps), i, left_of(draft_mass, qs), j


@triton.jit
def sum_of_residual(target, draft, words, draft_words, block, blocks, V, V_draft, scale_by, draft_scale_by,
                    ALIGNED: tl.constexpr, SEGMENT: tl.constexpr, WIDTH: tl.constexpr):
    """As sum_of_loaded, of a block of which SEGMENT entries are read at once, WIDTH by a thread.

    What shares leave changes one p and one q. The sum is made without it and then put right, so that no entry waits for it, nor
    is kept.
    """
    m, mass, factor, shift = load_facts(words, block, blocks)
    draft_m, draft_mass, draft_factor, draft_shift = load_facts(draft_words, block, blocks)
    target += block * BLOCK
    draft += block * BLOCK
    V -= block * BLOCK
    V_draft -= block * BLOCK
    if (m == float("inf")) | (draft_m == float("inf")):
        total, rest, i, draft_rest, j = sum_of_shares(
            target, draft, m, mass, factor, shift, draft_m, draft_mass, draft_factor, draft_shift, V, V_draft, scale_by,
            draft_scale_by, weigh, ALIGNED, SEGMENT, WIDTH)
    else:
        total, rest, i, draft_rest, j = sum_of_shares(
            target, draft, m, mass, factor, shift, draft_m, draft_mass, draft_factor, draft_shift, V, V_draft, scale_by,
            draft_scale_by, weigh_finite, ALIGNED, SEGMENT, WIDTH)

    largest = tl.full((), LARGEST_WEIGHT, tl.uint32)
    at_i = i & (BLOCK - 1)  # a place in the block also where there is none
    at_j = j & (BLOCK - 1)
    more = share(largest, factor, shift, False)  # p - q, at i
    more -= share_at(draft, at_i, V_draft, draft_m, draft_factor, draft_shift, draft_scale_by)
    less = share_at(target, at_j, V, m, factor, shift, scale_by)
    less -= share(largest, draft_factor, draft_shift, False)
    if i < BLOCK:
        total += tl.maximum(more + rest - tl.where(i == j, draft_rest, 0), 0) - tl.maximum(more, 0)
    if (j < BLOCK) & (i != j):
        total += tl.maximum(less - draft_rest, 0) - tl.maximum(less, 0)
    return total, pack_rests(i, rest, j, draft_rest)


@triton.jit
def row_of(b, i, start, length, own, own_draft, scratch, position, positions, S, V_draft, V, blocks, stride_draft_b,
           stride_draft_k, stride_target_b, stride_target_k, cu_drafts, bonus_tokens, draft_slots, is_greedy):
    """Of the i-th row of sequence b in a stage: its position, where it is, its scratch, its length, whether it is, and is the
    target's.

    Those of the target at so many positions from `position` on are the first, then come those of the draft.
    """
    is_target = i < positions
    i += tl.where(is_target, position, position - positions)
    row = first_row(b, rows_before(b, start, bonus_tokens), stride_target_b, stride_target_k, cu_drafts)
    row += i.to(tl.int64) * stride_target_k
    draft_row = first_draft_row(b, start, stride_draft_b, stride_draft_k, cu_drafts, draft_slots, S)
    draft_row += i.to(tl.int64) * stride_draft_k
    exists = tl.where(is_target, has_row(i, length, bonus_tokens), (i < length) & (is_greedy == 0))
    words = words_of(scratch, tl.where(is_target, own, own_draft) + i, blocks)
    return i, tl.where(is_target, row, draft_row), words, tl.where(is_target, V, V_draft), exists, is_target


# As in kernels.py, one compiled kernel serves every shape.
UNSPECIALIZED = [
    "draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample", "seed", "offset", "lengths", "cu_drafts",
    "greedy", "bonus_tokens", "temperature", "draft_slots", "draft_temperature", "scratch", "accepted", "next_token",
    "num_emitted", "emitted", "position", "positions", "K", "T", "S", "V_draft", "V", "blocks", "count", "stride_draft_b",
    "stride_draft_k", "stride_target_b", "stride_target_k", "fields", "stride_emitted",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def weigh_blocks(draft_tokens, draft_probs, target_probs, lengths, cu_drafts, greedy, bonus_tokens, temperature, draft_slots,
                 draft_temperature, scratch, position, positions, K, T, S, V_draft, V, blocks, count, stride_draft_b,
                 stride_draft_k, stride_target_b, stride_target_k, fields, POSITIONS: tl.constexpr, ALIGNED: tl.constexpr,
                 LIMBS: tl.constexpr, wait: tl.constexpr, release: tl.constexpr):
    """grid (B, ceil(blocks / count), rows): each program summarizes `count` blocks of a row.

    The rows are those of the target at so many positions from `position` on, then those of the draft.
    """
    if wait is not None:  # noqa: SIM102 - known to the compiler, unlike the next
        if position == 0:  # later ones wait for the stage before
            wait()
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * count
    i = tl.program_id(2)
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    own, own_draft, chances, bars, _ = places_of(draft_probs, scratch, b, K, T, blocks)
    heat, is_greedy = temperature_of(temperature, fields, greedy, b)
    if release is not None:
        release()
    _, row, words, size, exists, is_target = row_of(
        b, i, start, length, own, own_draft, scratch, position, positions, S, V_draft, V, blocks, stride_draft_b,
        stride_draft_k, stride_target_b, stride_target_k, cu_drafts, bonus_tokens, draft_slots, is_greedy)
    heat = tl.where(is_target, heat, temperature_of_draft(draft_temperature, heat, b))
    if exists & all_stand(draft_tokens + start, chances, bars, length, position, is_greedy, POSITIONS, wait):
        if draft_probs is None:
            summarize(target_probs + row, words, first, count, blocks, size, heat, is_greedy, ALIGNED, LIMBS)
        elif not LIMBS and draft_probs.dtype == target_probs.dtype:  # half as much code, but on Iris Xe a longer loop
            rows = target_probs if is_target else draft_probs
            summarize(rows + row, words, first, count, blocks, size, heat, is_greedy, ALIGNED, LIMBS)
        elif is_target:
            summarize(target_probs + row, words, first, count, blocks, size, heat, is_greedy, ALIGNED, LIMBS)
        else:
            summarize(draft_probs + row, words, first, count, blocks, size, heat, is_greedy, ALIGNED, LIMBS)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def share_rows(draft_tokens, draft_probs, target_probs, uniform_accept, seed, offset, lengths, cu_drafts, greedy,
               bonus_tokens, temperature, draft_slots, draft_temperature, scratch, position, positions, K, T, S, V_draft, V,
               blocks, stride_draft_b, stride_draft_k, stride_target_b, stride_target_k, fields, POSITIONS: tl.constexpr,
               ALIGNED: tl.constexpr, LIMBS: tl.constexpr, FLOAT64: tl.constexpr, CAPACITY: tl.constexpr, wait: tl.constexpr,
               release: tl.constexpr):
    """grid (B, rows), as of weigh_blocks: each program shares out a row, and writes a chance or a bar.

    All that the draft's own block tells alone is worked out before the kernel waits for what others have summarized, and in
    later stages before it knows whether the row counts.
    """
    b = tl.program_id(0).to(tl.int64)
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    own, own_draft, chances, bars, _ = places_of(draft_probs, scratch, b, K, T, blocks)
    heat, is_greedy = temperature_of(temperature, fields, greedy, b)
    if release is not None:
        release()
    i, row, words, size, exists, is_target = row_of(
        b, tl.program_id(1), start, length, own, own_draft, scratch, position, positions, S, V_draft, V, blocks,
        stride_draft_b, stride_draft_k, stride_target_b, stride_target_k, cu_drafts, bonus_tokens, draft_slots, is_greedy)
    heat = tl.where(is_target, heat, temperature_of_draft(draft_temperature, heat, b))
    if seed is None:
        u = bits(tl.load(uniform_accept + start + i, mask=i < length, other=0), FLOAT64)
    else:
        u = random_bits(tl.load(seed + b), tl.load(offset + b), i, ACCEPT)
    token = tl.load(draft_tokens + start + i, mask=i < length, other=-1)
    is_known = (token.to(tl.uint64) < V_draft.to(tl.uint64)) & (token < size)
    t = tl.where(is_known, token, 0).to(tl.int32)
    block = t // BLOCK
    if LIMBS:
        row = tl.where(exists, row, 0)  # loads have no mask, and past the last row is none
    end = tl.where(exists, size, 0)
    if draft_probs is None:
        x = load_block(target_probs + row, block, end, ALIGNED, LIMBS)
    elif draft_probs.dtype == target_probs.dtype:
        rows = target_probs if is_target else draft_probs
        x = load_block(rows + row, block, end, ALIGNED, LIMBS)
    elif is_target:
        x = load_block(target_probs + row, block, end, ALIGNED, LIMBS)
    else:
        x = load_block(draft_probs + row, block, end, ALIGNED, LIMBS)
    scale_by = scale_of(heat, LIMBS)
    m = largest_logit(x)
    w = weigh(x, m, scale_by)
    at = tl.arange(0, BLOCK)[None, :] == t % BLOCK
    weight = tl.sum(tl.where(at, w, 0).to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True)
    is_first = first_largest(w) == t % BLOCK
    if wait is not None:
        wait()
    if exists & all_stand(draft_tokens + start, chances, bars, length, position, is_greedy, POSITIONS, None):
        if is_greedy:
            tl.store(chances + i, largest_of_row(words, blocks, even(blocks), CAPACITY))
        else:
            c = tl.arange(0, CAPACITY)
            maxima = tl.load(words + c, mask=c < blocks, other=-0x800000).to(tl.int32).to(tl.float32, bitcast=True)  # -inf
            sums = words + even(blocks)
            weights = tl.load(sums + c, mask=c < blocks, other=0)
            block_weights = tl.load(sums + block)
            masses, mass = apportion_to_blocks(maxima, weights, m, block_weights, block, scale_by, LIMBS)
            factor, shift = quotient(mass, block_weights, LIMBS)
            p = share(weight, factor, shift, LIMBS)
            p += tl.where(is_first, left_of(mass, share(w, factor, shift, LIMBS)), 0)
            p = tl.where(is_known, p, 0)
            if draft_probs is None:  # a draft without probabilities is certain
                tl.store(chances + i, p)
                tl.store(bars + i, u >> 19, mask=i < length)  # the share of 2**44
            else:
                tl.store(tl.where(is_target, chances, bars) + i, tl.where(is_target, p, scale(u, p)))
            factors, shifts = quotient(masses, weights, LIMBS)
            tl.store(sums + c, masses, mask=c < blocks)
            tl.store(sums + even(blocks) + c, shifts << 32 | factors, mask=c < blocks)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sum_residual(draft_tokens, draft_probs, target_probs, lengths, cu_drafts, greedy, bonus_tokens, temperature, draft_slots,
                 draft_temperature, scratch, K, T, S, V_draft, V, blocks, count, stride_draft_b, stride_draft_k,
                 stride_target_b, stride_target_k, fields, POSITIONS: tl.constexpr, ALIGNED: tl.constexpr, LIMBS: tl.constexpr,
                 SEGMENT: tl.constexpr, WIDTH: tl.constexpr, wait: tl.constexpr, release: tl.constexpr):
    """grid (B, ceil(blocks / count)): each program finds where drafts end, and sums `count` blocks of the row to draw from."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * count
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    own, own_draft, chances, bars, found = places_of(draft_probs, scratch, b, K, T, blocks)
    heat, is_greedy = temperature_of(temperature, fields, greedy, b)
    scale_by = scale_of(heat, LIMBS)
    draft_scale_by = scale_of(temperature_of_draft(draft_temperature, heat, b), LIMBS)
    target_row = first_row(b, rows_before(b, start, bonus_tokens), stride_target_b, stride_target_k, cu_drafts)
    draft_row = first_draft_row(b, start, stride_draft_b, stride_draft_k, cu_drafts, draft_slots, S)
    if release is not None:
        release()
    n = end_of(draft_tokens + start, chances, bars, length, is_greedy, POSITIONS, wait)
    token = refused_draft(draft_tokens + start, n, length, V_draft)
    words = words_of(scratch, own + n, blocks)
    if first == 0:
        tl.store(found, n)
        tl.store(found + 1, tl.where(is_greedy, tl.load(chances + n), token.to(tl.int64)))
    if is_certain(is_greedy, n, length, bonus_tokens) == 0:
        sums = found + HEADER
        masses = words + even(blocks)
        last = tl.minimum(first + count, blocks)
        if token < 0:
            for block in range(first, last):
                tl.store(sums + block, tl.load(masses + block))
        else:
            target_probs += target_row + n * stride_target_k
            draft_probs += draft_row + n * stride_draft_k
            draft_words = words_of(scratch, own_draft + n, blocks)
            for block in range(first, last):
                if LIMBS:  # entries are kept, for a sixth fewer instructions
                    x = load_block(target_probs, block, V, ALIGNED, LIMBS)
                    y = load_block(draft_probs, block, V_draft, ALIGNED, LIMBS)
                    total, rests = sum_of_loaded(x, y, words, draft_words, block, blocks, scale_by, draft_scale_by, LIMBS)
                else:
                    total, rests = sum_of_residual(target_probs, draft_probs, words, draft_words, block, blocks, V, V_draft,
                                                   scale_by, draft_scale_by, ALIGNED, SEGMENT, WIDTH)
                tl.store(sums + block, total)
                tl.store(sums + even(blocks) + block, rests)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def draw(draft_tokens, draft_probs, target_probs, uniform_sample, seed, offset, lengths, cu_drafts, greedy, bonus_tokens,
         temperature, draft_slots, draft_temperature, scratch, accepted, next_token, num_emitted, emitted, K, T, S, V_draft, V,
         blocks, stride_draft_b, stride_draft_k, stride_target_b, stride_target_k, fields, stride_emitted,
         POSITIONS: tl.constexpr, ALIGNED: tl.constexpr, LIMBS: tl.constexpr, FLOAT64: tl.constexpr, PURPOSE: tl.constexpr,
         CAPACITY: tl.constexpr, wait: tl.constexpr):
    """grid (B,): find the block that holds the threshold among at most CAPACITY sums, and the entry in it.

    Without a draft's rows there is no sum_residual: this finds where drafts end, and takes the refused token off its block.
    """
    EARLY: tl.constexpr = not LIMBS and POSITIONS <= 256
    b = tl.program_id(0).to(tl.int64)
    start, length = drafts_of(b, K, T, lengths, cu_drafts)
    own, own_draft, chances, bars, found = places_of(draft_probs, scratch, b, K, T, blocks)
    heat, is_greedy = temperature_of(temperature, fields, greedy, b)
    position = tl.arange(0, POSITIONS)
    if seed is not None:
        seed += b
        offset += b
    else:
        uniform_sample += start + b
    if EARLY:
        u = bits_of_draw(uniform_sample, seed, offset, position, position <= length, FLOAT64, PURPOSE)
    next_token += b
    if bonus_tokens is not None:
        bonus_tokens += b
    if emitted is not None:
        emitted += b * stride_emitted
        tokens = tl.load(draft_tokens + start + position, mask=position < length, other=0)
    target_row = first_row(b, rows_before(b, start, bonus_tokens), stride_target_b, stride_target_k, cu_drafts)
    if draft_probs is not None:
        draft_row = first_draft_row(b, start, stride_draft_b, stride_draft_k, cu_drafts, draft_slots, S)
    i = tl.arange(0, CAPACITY)
    one = tl.arange(0, 1)
    if draft_probs is None:
        n = end_of(draft_tokens + start, chances, bars, length, is_greedy, POSITIONS, wait)
        token = refused_draft(draft_tokens + start, n, length, V_draft)
        largest = tl.load(chances + n)
    else:
        if wait is not None:
            wait()
        n = tl.load(found)
        largest = tl.load(found + 1)
        token = largest.to(tl.int32)
        found += HEADER
        residuals = tl.load(found + i, mask=i < blocks, other=0)  # on their way together; of no meaning where none is drawn
    if is_certain(is_greedy, n, length, bonus_tokens):
        write_token(next_token, emitted, bonus_tokens, n, length, largest + one, one == 0)
    else:
        words = words_of(scratch, own + n, blocks)
        masses = words + even(blocks)
        if draft_probs is None:
            sums = tl.load(masses + i, mask=i < blocks, other=0)
            sums -= tl.where((token >= 0) & (token // BLOCK == i), largest, 0)
        else:
            sums = residuals
        if EARLY:
            drawn = tl.sum(tl.where(position == n, u, 0), 0)
        else:
            drawn = bits_of_draw(uniform_sample, seed, offset, n, n >= 0, FLOAT64, PURPOSE)
        cumulative = running_sum(sums, 0, LIMBS)
        total = total_of(sums, LIMBS)
        if (total == 0) & (token >= 0):  # rare: the residual has no mass, so the draw is from the target row
            token = tl.full((), -1, tl.int32)
            sums = tl.load(masses + i, mask=i < blocks, other=0)
            cumulative = running_sum(sums, 0, LIMBS)
            total = total_of(sums, LIMBS)
        threshold = scale(drawn, total)
        is_before = cumulative <= threshold
        if LIMBS:
            before = total_of(tl.where(is_before, sums, 0), LIMBS)
            block = tl.sum(is_before.to(tl.int32), 0)
        else:  # both by one sum: the blocks are fewer than 2**10, and their sum at most 2**44
            both = tl.sum(tl.where(is_before, sums << 10 | 1, 0), 0)
            before = both >> 10
            block = (both & 1023).to(tl.int32)
        block = tl.where(total > 0, block, 0)
        target_probs += target_row + n * stride_target_k
        x = load_block(target_probs, block, V, ALIGNED, LIMBS)
        m, mass, factor, shift = load_facts(words, block, blocks)
        if draft_probs is not None:  # on their way together; past the last draft is no row
            draft_probs += tl.where(token < 0, 0, draft_row + n * stride_draft_k)
            y = load_block(draft_probs, block, tl.where(token < 0, 0, V_draft), ALIGNED, LIMBS)
            draft_words = words_of(scratch, tl.where(token < 0, own, own_draft) + n, blocks)
            draft_m, _, draft_factor, draft_shift = load_facts(draft_words, block, blocks)
            rests = tl.load(found + even(blocks) + block)
        scale_by = scale_of(heat, LIMBS)
        draft_scale_by = scale_of(temperature_of_draft(draft_temperature, heat, b), LIMBS)
        entry = tl.arange(0, BLOCK)[None, :]
        w = weigh(x, m, scale_by)
        p = share(w, factor, shift, LIMBS)
        if draft_probs is None:
            p, _, _ = give_rest(p, w, mass)
            p = tl.where(block * BLOCK + entry == token, 0, p)
        elif token < 0:
            p, _, _ = give_rest(p, w, mass)
        else:
            first, rest, draft_first, draft_rest = unpack_rests(rests)
            p += tl.where(entry == first, rest, 0)
            q = share(weigh(y, draft_m, draft_scale_by), draft_factor, draft_shift, LIMBS)
            q += tl.where(entry == draft_first, draft_rest, 0)
            p = tl.maximum(p - q, 0)
        running = running_sum(p, 1, LIMBS) - (threshold - before)
        if LIMBS:
            place = tl.where(total > 0, block * BLOCK + tl.sum((running <= 0).to(tl.int32)), 0)
            write_token(next_token, emitted, bonus_tokens, n, length, place.to(tl.int64) + one, one == 0)
        else:  # by the lane that has it
            place = block * BLOCK + entry
            is_it = (running - 1).to(tl.uint64) < p.to(tl.uint64)  # 0 < running <= p
            is_it |= place == tl.where(total > 0, -1, 0)  # token 0 of a row without mass
            write_token(next_token, emitted, bonus_tokens, n, length, place.to(tl.int64), is_it)
    tl.store(accepted + b, n)
    if num_emitted is not None:
        tl.store(num_emitted + b, n + 1)
    if emitted is not None:
        write_others(emitted, tokens, n, -1, K, POSITIONS)
