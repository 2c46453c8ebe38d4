"""The rule on its own: worked by hand, on the edge cases, and exhaustively, so that it can judge the implementations."""

import collections
import functools
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from spec_verify_xpu import fixed_point, rule

EIGHTHS = [w for w in itertools.product(range(9), repeat=3) if sum(w) == 8]  # the 45 distributions over 3 tokens
N = 840  # the uniforms' range: a multiple of 1 to 8, so that every scale(u, n) is exactly uniform on [0, n)


@functools.lru_cache(None)
def draft_law(q):
    """The law of the draft that `draw` makes of these weights, its uniform enumerated."""
    drawn = collections.Counter(rule.draw(q, u, N) for u in range(N))
    return [Fraction(drawn[t], N) for t in range(len(q))]


@functools.lru_cache(None)
def acceptance(q_t, p_t):
    """The chance that a draft of these weights is accepted, its uniform enumerated."""
    rows = [(p_t, 8 - p_t), (8, 0)]
    accepted = [rule.verify_sequence([0], [(q_t, 8 - q_t)], rows, [u], [0, 0], int, N)[0] for u in range(N)]
    return Fraction(sum(accepted), N)


def refusal_law(q, p):
    """The law of the token that replaces a refused draft, its uniform enumerated. p < q somewhere."""
    t = next(t for t in range(3) if p[t] < q[t])
    drawn = [rule.verify_sequence([t], [q], [p, (8, 0, 0)], [N - 1], [u, 0], int, N) for u in range(N)]
    assert all(n == 0 for n, _ in drawn)
    return [Fraction(sum(token == x for _, token in drawn), N) for x in range(3)]


def test_output_law_is_the_targets_for_every_pair_of_distributions():
    """All 2,025 pairs in eighths over 3 tokens: the emitted token follows the target exactly, in Fractions.

    The three uniforms, of the draft, of its test and of what replaces it, are independent, so each is enumerated alone, and
    the laws are combined.
    """
    for q, p in itertools.product(EIGHTHS, repeat=2):
        stands = [draft_law(q)[t] * acceptance(q[t], p[t]) for t in range(3)]
        replaced = refusal_law(q, p) if q != p else [Fraction(0)] * 3
        assert [stands[x] + (1 - sum(stands)) * replaced[x] for x in range(3)] == [Fraction(w, 8) for w in p], (q, p)


def law_given_drafts(tokens, draft, target):
    """The law of (accepted, next_token) for these drafts, as {(n, token): chance}."""
    K, law = len(tokens), collections.Counter()
    passes = [acceptance(draft[i][t], target[i][t]) for i, t in enumerate(tokens)]
    for n in range(K + 1):
        chance = math.prod(passes[:n]) * (1 - passes[n] if n < K else 1)
        for u in range(N) if chance else ():
            accept = [0] * n + [N - 1] * (K - n)  # the least uniform always passes where p > 0, the greatest fails where p < q
            got, token = rule.verify_sequence(tokens, draft, target, accept, [u] * (K + 1), int, N)
            assert got == n
            law[n, token] += chance / N
    return law


def test_law_of_two_drafts():
    """K = 2 on 25 pairs of rows: the first two emitted tokens follow the target's product law."""
    for case in range(25):
        q0, q1, p0, p1, p2 = (
            EIGHTHS[(case * step + shift) % 45] for step, shift in ((7, 1), (11, 5), (13, 2), (17, 9), (19, 30))
        )
        first, second = [Fraction(0)] * 3, [Fraction(0)] * 3  # the law of token 1; of token 2 where draft 1 stood
        stood = Fraction(0)
        for s, t in itertools.product(range(3), repeat=2):
            chance_drafted = draft_law(q0)[s] * draft_law(q1)[t]
            if chance_drafted:
                for (n, token), chance in law_given_drafts([s, t], [q0, q1], [p0, p1, p2]).items():
                    first[s if n else token] += chance_drafted * chance
                    if n:
                        stood += chance_drafted * chance
                        second[t if n == 2 else token] += chance_drafted * chance
        assert first == [Fraction(w, 8) for w in p0]
        assert second == [stood * Fraction(w, 8) for w in p1]


def test_by_hand():
    """Quarters over 3 tokens, uniforms out of 4: draft 1 has q = 2/4, p = 1/4, so uniforms 0 and 1 accept, 2 and 3 do not."""
    q, p, bonus = [1, 2, 1], [2, 1, 1], [0, 0, 4]

    def verify(ua, us):
        return rule.verify_sequence([1], [q], [p, bonus], [ua], [us, us], weight=int, uniform_range=4)

    assert [verify(ua, 0) for ua in range(4)] == [(1, 2), (1, 2), (0, 0), (0, 0)]
    assert [verify(3, us) for us in range(4)] == [(0, 0)] * 4  # the residual is [1, 0, 0]


def test_bonus_by_hand():
    """As above without a last row: a draft that stands is followed by the bonus token, any that ends the draft by its row's."""

    def verify(tokens, ua, bonus=-5):
        return rule.verify_sequence(tokens, [[1, 2, 1]], [[2, 1, 1]], [ua], [0, 0], int, 4, bonus)

    assert [verify([1], ua) for ua in range(4)] == [(1, -5), (1, -5), (0, 0), (0, 0)]
    assert verify([-1], 0) == (0, 0) and verify([], 0) == (0, -5)
    greedy = functools.partial(rule.verify_sequence_greedy, target=[[2, 1, 1]], bonus=9)
    assert [greedy(tokens) for tokens in ([0], [1], [-1], [])] == [(1, 9), (0, 0), (0, 0), (0, 9)]


@pytest.mark.parametrize(
    "x, weight",
    [(0.0, 0), (-1.0, 0), (float("nan"), 0), (float("-inf"), 0), (1.0, 2**44), (float("inf"), 2**44), (1.5, 2**44),
     (0.5, 2**43), (2.0**-44, 1), (2.0**-45, 0), (2.0**-44 * 1.75, 1), (1e-45, 0)],
)  # fmt: skip
def test_fixed(x, weight):
    assert rule.fixed(x) == weight
    assert fixed_point.fixed(torch.tensor([x])).tolist() == [weight]


@pytest.mark.parametrize(
    "u, dtype, expected",
    [(0.0, "float32", 0), (0.5, "float32", 2**62), (1.0, "float32", 2**63 - 2**39), (float("inf"), "float32", 2**63 - 2**39),
     (float("nan"), "float32", 0), (-0.5, "float32", 0), (2.0**-63, "float32", 1), (2.0**-64, "float32", 0),
     (1.0, "float64", 2**63 - 2**10), (float("inf"), "float64", 2**63 - 2**10), (float("nan"), "float64", 0),
     (2.0**-63, "float64", 1), (2.0**-64, "float64", 0), (1 - 2.0**-53, "float64", 2**63 - 2**10), (-1.0, "float64", 0),
     (-1, "int64", 2**63 - 1), (-(2**63), "int64", 0), (5, "int64", 5)],
)  # fmt: skip
def test_bits(u, dtype, expected):
    tensor = torch.tensor([[u]], dtype=getattr(torch, dtype))
    assert rule.as_bits(tensor) == [[expected]]
    assert fixed_point.bits(tensor).tolist() == [[expected]]


def test_probabilities_by_hand():
    """Weights of 753.2 * 2**22 and half of that, where the temperature cancels the logarithm: two thirds, and a third.

    Their sum has 33 bits, so the quotient is 2**60 // (4738801152 // 4 + 1) = 973175676, and the shares are
    3159200768 * 973175676 >> 18 and half of that; the first gets the rest.
    """
    scale = rule.LOG2E
    assert [rule.weigh(x, 1.0) for x in (0.0, -1.0, -32.0, -33.0, -math.inf)] == [3159200768, 1579600384, 1, 0, 0]
    assert rule.apportion(rule.ONE, [3159200768, 1579600384]) == rule.probabilities([5.0, 4.0], scale)
    shares = [3159200768 * 973175676 >> 18, 1579600384 * 973175676 >> 18]
    assert rule.probabilities([5.0, 4.0], scale) == [2**44 - shares[1], shares[1]]
    assert [3 * x / 2**44 for x in shares] == pytest.approx([2, 1], abs=1e-8)


def test_probabilities_of_equal_logits():
    """Each gets the same, rounded down, and the first what that leaves. With two, 2**60 // 1579600385 for 6318401536 in all."""
    share = 3159200768 * (2**60 // (6318401536 // 4 + 1)) >> 18
    assert rule.probabilities([-7.0, -7.0], 1.0) == [2**44 - share, share]
    for n in (3, 100):
        first, *others = rule.probabilities([2.5] * n, 0.3)
        assert first >= others[0] and set(others) == {others[0]} and first + sum(others) == 2**44


@pytest.mark.parametrize(
    "row, expected",
    [
        ([3.0], [2**44]),
        ([-math.inf, 3.4e38, math.nan], [0, 2**44, 0]),
        ([-math.inf, math.nan], [0, 0]),
        ([0.0, math.inf, 3.4e38], [0, 2**44, 0]),
        ([0.0, -34.0 * math.log(2)], [2**44, 0]),  # under 2**-33 of the largest weight
        ([-100.0] * 1024 + [0.0], [0] * 1024 + [2**44]),  # a block without a share, whose own weights are all the largest
        ([0.0] + [-math.inf] * 2047 + [-math.inf], [2**44] + [0] * 2048),
    ],
    ids=["one", "masked", "nothing", "infinite", "small", "small_block", "masked_blocks"],
)
def test_probabilities_at_their_ends(row, expected):
    assert rule.probabilities(row, 1.0) == expected
    assert fixed_point.probabilities(torch.tensor(row), torch.tensor(1.0)).tolist() == expected


def test_temperatures():
    """Above 0 they are taken into [2**-60, 2**60]; what is not is 0, NaN too."""
    row = [0.5, 0.25, -1.0]
    assert rule.probabilities(row, 1e-45) == rule.probabilities(row, 2.0**-60) == [2**44, 0, 0]
    assert rule.probabilities(row, math.inf) == rule.probabilities(row, 2.0**60) == rule.probabilities([0.0] * 3, 1.0)
    assert [rule.temperature_at([0.1, 0.0, -1.0, math.nan, 1e-45], b) for b in range(5)] == [
        rule.float32(0.1),
        0,
        0,
        0,
        2.0**-149,
    ]


def test_scale_at_its_limits():
    halves = [2**n + x for n in (31, 32) for x in (-1, 0, 1)]
    values = [0, 1, 2**21 - 1, 2**21, *halves, 2**42, 2**44, 2**62 + 12345, 2**63 - 2**32, 2**63 - 1]
    for u, n in itertools.product(values, repeat=2):
        assert fixed_point.scale(torch.tensor(u), torch.tensor(n)).item() == u * n // 2**63


def test_lists_are_read_as_float32_and_ints_as_bits():
    """0.1 in float32 is more than 0.1, so a draft of 0.1 against a float32 0.1 still never rejects."""
    tensors = rule.verify([[0]], torch.tensor([[[0.1, 0.9]]]), torch.tensor([[[0.1, 0.9], [0.5, 0.5]]]), [[-1]], [[0, 2**62]])
    lists = rule.verify([[0]], [[[0.1, 0.9]]], [[[0.1, 0.9], [0.5, 0.5]]], [[-1]], [[0, 2**62]])
    assert tensors == lists == ([1], [1])


@pytest.mark.parametrize("case", json.loads((Path(__file__).parent / "edge_cases.json").read_text()), ids=lambda c: c["name"])
def test_edge_case(case):
    arguments = [
        case[name] for name in ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample", "lengths")
    ]
    assert rule.verify(*arguments) == (case["accepted"], case["next_token"]), case["why"]
