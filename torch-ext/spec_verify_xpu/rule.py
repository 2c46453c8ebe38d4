"""The rule of speculative verification in plain Python integers: every other implementation equals this page bit for bit.

Draft token t is accepted with probability min(1, p(t) / q(t)); the first rejection draws from the normalised residual
max(0, p - q); full acceptance draws from the target's last row (Leviathan et al. 2023, algorithm 1; Chen et al. 2023,
algorithm 2). Probabilities become integers once, at load. After that there is no rounding and no order of addition.
"""

from ctypes import c_float
from itertools import accumulate, chain, repeat

ONE = 2**44  # the integer that stands for probability 1
UNIFORM_RANGE = 2**63  # a uniform is an integer in [0, 2**63)
MAX_VOCABULARY = 2**19 - 1  # entries of a row, so that a sum of ONEs stays below 2**63


def fixed(x):
    """A probability as an integer in [0, 2**44]: floor(x * 2**44), NaN and negatives to 0, more than 1 to 1."""
    return int(min(x, 1.0) * ONE) if x > 0 else 0


def bits(u, largest=1 - 2.0**-24):
    """A uniform as 63 bits: the low ones of an int, or floor(u * 2**63) of a float, at most its dtype's largest under 1."""
    if isinstance(u, int):
        return u & (UNIFORM_RANGE - 1)
    return int(min(u, largest) * UNIFORM_RANGE) if u > 0 else 0


def verify_sequence(tokens, draft, target, accept, sample, weight=fixed, uniform_range=UNIFORM_RANGE):
    """Verify one sequence: (accepted, next_token).

    tokens [L] ints, draft [L][V_draft] and target [L + 1][V_target] rows, accept [L] and sample [L + 1] ints in
    [0, uniform_range). `weight` makes a row's entry an integer, so a test can pass integers (weight=int) and a small
    uniform_range, and enumerate every outcome.
    """

    def scale(u, n):
        return u * n // uniform_range

    def is_draft(i):
        return i < len(tokens) and 0 <= tokens[i] < len(draft[i])

    def is_accepted(i):
        t = tokens[i]
        p = target[i][t] if t < len(target[i]) else 0
        return scale(accept[i], weight(draft[i][t])) < weight(p)

    n = 0
    while is_draft(n) and is_accepted(n):
        n += 1

    weights = [weight(p) for p in as_list(target[n])]
    if is_draft(n):
        q = chain(as_list(draft[n]), repeat(0))  # q is 0 past the draft's vocabulary
        residual = [max(0, p - weight(x)) for p, x in zip(weights, q)]
        weights = residual if any(residual) else weights

    threshold = scale(sample[n], sum(weights))
    for j, cumulative in enumerate(accumulate(weights)):
        if cumulative > threshold:
            return n, j
    return n, 0  # the row has no mass


def verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths=None):
    """Verify a batch given as tensors or nested lists (floats in lists are read as float32, ints as random bits).

    Shapes as in `spec_verify_xpu.verify`. Returns two lists of B ints, accepted and next_token.
    """
    accept, sample = as_bits(uniform_accept), as_bits(uniform_sample)
    tokens, target_probs = as_list(draft_tokens), as_floats(target_probs)
    draft_probs = draft_probs if draft_probs is None else as_floats(draft_probs)
    lengths = [len(row) for row in tokens] if lengths is None else as_list(lengths)

    results = []
    for b, row in enumerate(tokens):
        row = row[: min(max(lengths[b], 0), len(row))]
        draft = one_hot(row, len(target_probs[b][0])) if draft_probs is None else draft_probs[b]
        results.append(verify_sequence(row, draft, target_probs[b], accept[b], sample[b]))
    return [n for n, _ in results], [token for _, token in results]


def one_hot(tokens, vocabulary):
    """Rows of drafts without probabilities: each draft is certain."""
    return [[1.0 if j == t else 0.0 for j in range(vocabulary)] for t in tokens]


def as_bits(uniforms):
    """Uniforms [B, n] as lists of 63-bit ints."""
    double = str(getattr(uniforms, "dtype", None)) == "torch.float64"
    largest = 1 - 2.0**-53 if double else 1 - 2.0**-24
    return [[bits(u, largest) for u in row] for row in as_list(as_floats(uniforms))]


def as_list(x):
    return x.tolist() if hasattr(x, "tolist") else x


def as_floats(x):
    """Nested lists with each float rounded to float32; half-precision tensors as float32, which is exact."""
    if isinstance(x, list):
        return [as_floats(y) for y in x]
    if isinstance(x, float):
        return c_float(x).value
    return x.float() if getattr(x, "itemsize", 4) == 2 else x
