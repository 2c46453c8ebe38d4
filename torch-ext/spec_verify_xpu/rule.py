"""The rule of speculative verification in plain Python integers: every other implementation equals this page bit for bit.

Draft token t is accepted with probability min(1, p(t) / q(t)); the first rejection draws from the normalised residual
max(0, p - q); full acceptance draws from the target's last row (Leviathan et al. 2023, algorithm 1; Chen et al. 2023,
algorithm 2). Probabilities become integers once, at load. After that there is no rounding and no order of addition.

First the rule for one sequence, then a row of logits as a row of integers, then what applies them to batches: functions of the
same names as the public ones.
"""

from ctypes import c_float
from itertools import accumulate, chain, repeat
from math import inf

ONE = 2**44  # the integer that stands for probability 1
UNIFORM_RANGE = 2**63  # a uniform is an integer in [0, 2**63)
MAX_VOCABULARY = 2**19 - 1  # entries of a row, so that a sum of ONEs stays below 2**63
LOW_32, LOW_63 = 2**32 - 1, 2**63 - 1

ACCEPT, SAMPLE, DRAW = range(3)  # what a seed's bits are for: verify's tests, verify's draws, sample's draws

BLOCK = 1024  # logits whose weights are relative to their own maximum, so that a row is read once
LOG2E = float.fromhex("0x1.715476p+0")  # a float32, as all that follow
SMALLEST_POWER = -64.0  # less is no different: less than 2**-33 of the largest weight is 0
# g**5 + C[0] * g**4 + .. + C[4] is 376.6061 * 2**g for g in [1/2, 3/2], to 8e-8 of it.
COEFFICIENTS = [float.fromhex(x) for x in ("0x1.24d482p+1", "0x1.6a85f6p+4", "0x1.64f3b4p+6", "0x1.057c96p+8", "0x1.788ac6p+8")]
ALMOST_HALF = 0.5 - 2.0**-25


def fixed(x):
    """A probability as an integer in [0, 2**44]: floor(x * 2**44), NaN and negatives to 0, more than 1 to 1."""
    return int(min(x, 1.0) * ONE) if x > 0 else 0


def bits(u, largest=1 - 2.0**-24):
    """A uniform as 63 bits: the low ones of an int, or floor(u * 2**63) of a float, at most its dtype's largest under 1."""
    if isinstance(u, int):
        return u & LOW_63
    return int(min(u, largest) * UNIFORM_RANGE) if u > 0 else 0


def verify_sequence(tokens, draft, target, accept, sample, weight=fixed, uniform_range=UNIFORM_RANGE, bonus=None):
    """Verify one sequence: (accepted, next_token).

    tokens [L] ints, draft [L][V_draft] and target [L + 1][V_target] rows, accept [L] and sample [L + 1] ints in
    [0, uniform_range). `weight` makes a row's entry an integer, so a test can pass integers (weight=int) and a small
    uniform_range, and enumerate every outcome. A bonus token that was drawn elsewhere follows drafts that all stand, and the
    target's last row is not needed.
    """

    def is_draft(i):
        return i < len(tokens) and 0 <= tokens[i] < len(draft[i])

    def is_accepted(i):
        t = tokens[i]
        p = target[i][t] if t < len(target[i]) else 0
        return accept[i] * weight(draft[i][t]) // uniform_range < weight(p)

    n = 0
    while is_draft(n) and is_accepted(n):
        n += 1
    if n == len(tokens) and bonus is not None:
        return n, bonus

    weights = [weight(p) for p in as_list(target[n])]
    if is_draft(n):
        q = chain(as_list(draft[n]), repeat(0))  # q is 0 past the draft's vocabulary
        residual = [max(0, p - weight(x)) for p, x in zip(weights, q)]
        weights = residual if any(residual) else weights
    return n, draw(weights, sample[n], uniform_range)


def draw(weights, u, uniform_range=UNIFORM_RANGE):
    """The token that u draws from a row of integers: the first whose running sum passes u's share of the row's sum."""
    threshold = u * sum(weights) // uniform_range
    return next((j for j, cumulative in enumerate(accumulate(weights)) if cumulative > threshold), 0)  # 0 if it has no mass


def verify_sequence_greedy(tokens, target, bonus=None):
    """Verify one sequence without chance: a draft is accepted while it is its row's argmax. Returns (accepted, next_token)."""
    n = 0
    while n < len(tokens) and tokens[n] == argmax(target[n]):
        n += 1
    return n, bonus if n == len(tokens) and bonus is not None else argmax(target[n])


def argmax(row):
    """The first of the largest entries, NaN being below all numbers."""
    row = as_list(row)
    return max(range(len(row)), key=lambda j: (row[j] == row[j], row[j]))


def emit_sequence(tokens, accepted, next_token, pad=-1):
    """What a step adds to a sequence: the accepted drafts and the next token, padded to one more than the drafts."""
    n = min(max(accepted, 0), len(tokens))
    return [*tokens[:n], next_token, *[pad] * (len(tokens) - n)]


def probabilities(logits, temperature):
    """softmax(logits / temperature) in integers that sum to 2**44: [V] floats, a temperature of 0 or more -> [V] ints.

    Every operation on floats is one of float32, rounded once, a product and sum together. NaN counts as -inf, +inf shares all
    mass with its equals, and a row of -inf has no mass: zeros. Each block of 1,024 logits has weights relative to its own
    maximum; the blocks share 2**44 by their sums of weights and maxima, and the entries of a block its share. Integers, so
    sums have no order here either.
    """
    scale = float32(LOG2E / min(max(float32(temperature), 2.0**-60), 2.0**60))
    row = [x if x == x else -inf for x in logits]
    blocks = [row[i : i + BLOCK] for i in range(0, len(row), BLOCK)]
    maxima = [max(block) for block in blocks]
    weights = [[weigh(below(x, m), scale) for x in block] for block, m in zip(blocks, maxima)]
    masses = []
    for m, block_weights in zip(maxima, weights):
        p, n = power(below(m, max(maxima)), scale)  # of this block's maximum, by the row's
        masses += [(sum(block_weights) >> 3) * int(p * 2**14) >> 10 - n]
    return [x for mass, block_weights in zip(apportion(ONE, masses), weights) for x in apportion(mass, block_weights)]


def apportion(total, weights):
    """Integers that sum to total, as the weights are to one another, rounded down; the first largest gets what is left.

    The quotient has 29 bits or more, so that takes less than 2**-28 of the total, and one for each weight.
    """
    S = sum(weights)
    if S == 0:
        return weights
    size, total_size = S.bit_length(), total.bit_length()
    quotient = (total << 61 - total_size) // ((S << 31 >> size) + 1)  # the divisor has 31 bits
    shares = [w * quotient >> 30 + size - total_size for w in weights]
    shares[weights.index(max(weights))] += total - sum(shares)
    return shares


def weigh(x, scale):
    """2**(x * scale) in units of 2**-31.6, to the nearest: an int below 2**32, and 0 for -inf."""
    p, n = power(x, scale)
    return int(float32(p * 2.0 ** (n + 22) + ALMOST_HALF))


def power(x, scale):
    """753.2 * 2**(x * scale) for x <= 0, as (p, n) with the value p * 2**n: p a float32 in [512, 1100], n in [-64, 0].

    p * g + c is rounded once, as a fused product and sum is. A double holds it: g is a multiple of 2**-24, so it has 51 bits.
    """
    t = max(float32(x * scale), SMALLEST_POWER)
    n = round(t)  # half to even, as adding and subtracting 1.5 * 2**23 does
    g = float32(t - n + 1)
    p = float32(g + COEFFICIENTS[0])
    for c in COEFFICIENTS[1:]:
        p = float32(p * g + c)
    return p, n


def below(x, maximum):
    """x - maximum where that is a number; -inf is not above itself, but below everything."""
    if x == -inf:
        return x
    return 0.0 if x == maximum else float32(x - maximum)


def float32(x):
    """The nearest float32. Sums, products and quotients of float32 that a double has rounded before are no different."""
    return c_float(x).value


def mask(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """A row of logits with -inf in place of what is cut. Ranks are by logit, as argmax has it, and of equals by place.

    The first top_k stay, or all if that is not above 0. Then, by the probabilities of what that leaves, those stay that have
    less than top_p before them, the first in any case, and that have min_p of the first's or more.
    """
    row, V = as_list(logits), len(logits)
    ranks = sorted(range(V), key=lambda j: (row[j] == row[j], row[j]), reverse=True)  # stable all the same
    k = V if top_k is None or top_k <= 0 else top_k
    cut = set(ranks[k:])
    P = probabilities([-inf if j in cut else x for j, x in enumerate(row)], temperature)
    if top_p is not None:
        before = accumulate((P[j] for j in ranks), initial=0)
        cut.update(j for j, mass in zip(ranks, before) if mass >= max(fixed(top_p), 1))
    if min_p is not None:
        cut.update(j for j in ranks if P[j] * ONE < P[ranks[0]] * fixed(min_p))
    return [-inf if j in cut else x for j, x in enumerate(row)]


def random_bits(seed, offset, position, purpose):
    """63 bits that follow from four integers: the seed is Philox's key, the others its counter, words 0 and 1 its output."""
    counter = offset & LOW_32, offset >> 32 & LOW_32, position, purpose
    low, high, _, _ = philox(counter, (seed & LOW_32, seed >> 32 & LOW_32))
    return (high << 32 | low) & LOW_63


def philox(counter, key):
    """Philox-4x32-10 (Salmon et al. 2011, section 4.3): 4 words of 32 bits from a counter of 4 and a key of 2.

    Also right where 64-bit products wrap, so the other implementations on the CPU call it with tensors and machine integers.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & LOW_32) ^ c1 ^ k0, b & LOW_32, (a >> 32 & LOW_32) ^ c3 ^ k1, a & LOW_32
        k0, k1 = k0 + 0x9E3779B9 & LOW_32, k1 + 0xBB67AE85 & LOW_32
    return c0, c1, c2, c3


def verify(draft_tokens, draft_probs, target_probs, uniform_accept=None, uniform_sample=None, lengths=None, greedy=None,
           seed=None, offset=0, temperature=None, bonus_tokens=None, draft_slots=None, draft_temperature=None):  # fmt: skip
    """Verify a batch given as tensors or nested lists (floats in lists are read as float32, ints as random bits).

    Shapes as in `spec_verify_xpu.verify`; with a temperature rows are logits, as in `spec_verify_xpu.verify_logits`. Returns
    two lists of B ints, accepted and next_token.
    """
    tokens, target, draft = as_list(draft_tokens), as_floats(target_probs), by_slot(as_floats(draft_probs), draft_slots)
    accept, sample = as_bits(uniform_accept), as_bits(uniform_sample)
    sequences = []
    for b, row in enumerate(tokens):
        L = len(row) if lengths is None else min(max(int(lengths[b]), 0), len(row))
        sequences.append((row[:L], *(x if x is None else x[b] for x in (draft, target, accept, sample))))
    return verify_batch(sequences, greedy, seed, offset, temperature, bonus_tokens, draft_temperature)


def verify_varlen(draft_tokens, draft_probs, target_probs, cu_drafts, max_drafts, uniform_accept=None, uniform_sample=None,
                  greedy=None, seed=None, offset=0, temperature=None, bonus_tokens=None, draft_slots=None,
                  draft_temperature=None):  # fmt: skip
    """As `verify`, for sequences one behind the other. Shapes as in `spec_verify_xpu.verify_varlen`."""
    tokens, target, draft = as_list(draft_tokens), as_floats(target_probs), by_slot(as_floats(draft_probs), draft_slots)
    accept, sample = as_bits(uniform_accept), as_bits(uniform_sample)
    sequences = []
    for b, (start, L) in enumerate(spans(cu_drafts, len(tokens), max_drafts)):
        drafts, draws = slice(start, start + L), slice(start + b, start + b + L + 1)
        rows = draws if bonus_tokens is None else drafts
        parts = ((draft, drafts if draft_slots is None else b), (target, rows), (accept, drafts), (sample, draws))
        sequences.append((tokens[drafts], *(x if x is None else x[part] for x, part in parts)))
    return verify_batch(sequences, greedy, seed, offset, temperature, bonus_tokens, draft_temperature)


def by_slot(draft, draft_slots):
    """The draft's rows of each sequence, [B][D], where they are kept in slots, [S][D]; without slots as they are."""
    return draft if draft_slots is None else [draft[min(max(x, 0), len(draft) - 1)] for x in as_list(draft_slots)]


def spans(cu_drafts, T, max_drafts):
    """Where each sequence's drafts start among T, and how many count: offsets clamped to [0, T], lengths to [0, max_drafts]."""
    at = [min(max(x, 0), T) for x in as_list(cu_drafts)]
    return [(start, min(max(end - start, 0), max_drafts)) for start, end in zip(at, at[1:])]


def verify_batch(sequences, greedy, seed, offset, temperature, bonus_tokens, draft_temperature=None):
    """Verify sequences of (tokens, draft, target, accept, sample): two lists of ints, accepted and next_token.

    A draft may have more rows than tokens.
    """
    results, weight = [], fixed if temperature is None else int
    for b, (tokens, draft, target, accept, sample) in enumerate(sequences):
        T = None if temperature is None else temperature_at(temperature, b)
        bonus = None if bonus_tokens is None else at(bonus_tokens, b)
        if (greedy is not None and at(greedy, b)) or T == 0:
            results.append(verify_sequence_greedy(tokens, target, bonus))
            continue
        if T is not None:
            draft_T = T if draft_temperature is None else temperature_at(draft_temperature, b)
            draft, target = (
                rows if rows is None else [probabilities(as_list(row), heat) for row in rows]
                for rows, heat in ((draft, draft_T), (target, T))
            )
        if draft is None:
            draft = one_hot(tokens, target, 1.0 if T is None else ONE)
        if seed is not None:
            accept, sample = (
                [random_bits(at(seed, b), at(offset, b), i, purpose) for i in range(len(tokens) + 1)]
                for purpose in (ACCEPT, SAMPLE)
            )
        results.append(verify_sequence(tokens, draft, target, accept, sample, weight, bonus=bonus))
    return [n for n, _ in results], [token for _, token in results]


def verify_greedy(draft_tokens, target, lengths=None):
    """Verify a batch without chance, as `verify` with greedy all True."""
    return verify(draft_tokens, None, target, lengths=lengths, greedy=True)


def sample(probs, uniform=None, seed=None, offset=0, temperature=None):
    """Draw a token from each row of probs [R][V], with a temperature of logits: a list of R ints."""
    if seed is None:
        uniforms = as_bits([uniform] if isinstance(uniform, list) else uniform[None])[0]
    else:
        uniforms = [random_bits(at(seed, r), at(offset, r), 0, DRAW) for r in range(len(probs))]
    tokens = []
    for r, (row, u) in enumerate(zip(map(as_list, as_floats(probs)), uniforms)):
        T = None if temperature is None else temperature_at(temperature, r)
        if T == 0:
            tokens.append(argmax(row))
        else:
            tokens.append(draw([fixed(p) for p in row] if T is None else probabilities(row, T), u))
    return tokens


def emit(draft_tokens, accepted, next_token, pad=-1):
    """What a step adds to each sequence, [B][K + 1]."""
    return [emit_sequence(*x, pad) for x in zip(as_list(draft_tokens), as_list(accepted), as_list(next_token))]


def one_hot(tokens, target, one):
    """Rows of drafts without probabilities, as long as the target's: each draft is certain."""
    return [[one if j == t else 0 for j in range(len(row))] for t, row in zip(tokens, target)]


def as_bits(uniforms):
    """Uniforms as 63-bit ints, nested as they are."""
    largest = 1 - 2.0**-53 if str(getattr(uniforms, "dtype", None)) == "torch.float64" else 1 - 2.0**-24

    def convert(x):
        return [convert(y) for y in x] if isinstance(x, list) else bits(x, largest)

    return uniforms if uniforms is None else convert(as_list(as_floats(uniforms)))


def at(x, b):
    """An argument's value for sequence b: one for all, or one of B."""
    return int(x[b]) if hasattr(x, "__getitem__") else x


def temperature_at(temperature, b):
    """As `at`, a float32; 0, which is without chance, stands for all that are not above 0, NaN too."""
    T = float32(float(temperature[b] if hasattr(temperature, "__getitem__") else temperature))
    return T if T > 0 else 0


def as_list(x):
    return x.tolist() if hasattr(x, "tolist") else x


def as_floats(x):
    """Nested lists with each float rounded to float32; half-precision tensors as float32, which is exact."""
    if isinstance(x, list):
        return [as_floats(y) for y in x]
    if isinstance(x, float):
        return c_float(x).value
    return x.float() if getattr(x, "itemsize", 4) == 2 else x
