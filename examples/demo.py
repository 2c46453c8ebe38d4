"""Decode real text speculatively and check every step against the rule: `make demo`.

The text is Python's own manual, which every CPython carries. Two language models are counted from it: a bigram drafts four
tokens, a trigram scores them in one pass, and `verify` decides which of them stand and what comes next. The reference
decides again from the same random bits, and the two must be equal. Models and random bits live on the CPU, so a seed
gives the same text whatever device verifies.
"""

import argparse
import re
import sys
import time
from collections import defaultdict
from functools import lru_cache
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch.nn.functional import pad

import spec_verify_xpu as sv

B, K = 8, 4  # sequences, and drafts a step
TRUST = (1, 15 / 16, 5 / 8)  # the share of what followed a context of 0, 1, 2 tokens; the rest is the row of one token less
WIDTH = 100


def read_tokens():
    """The manual's prose as strings: words and punctuation, each with the space before it, and a newline between paragraphs."""
    paragraphs = (" ".join(p.split()) for topic in topics.values() for p in topic.split("\n\n") if is_prose(p))
    text = ".\n" + "\n".join(dict.fromkeys(paragraphs)) + "\n"
    return re.findall(r"\n| ?(?:\w+|[^\w\s]+)", text)


def is_prose(paragraph):
    """Headings are underlined, code and grammar are indented, and list items begin with a mark."""
    return paragraph[:1].isupper() and paragraph.rstrip()[-1] in ".:"


def count(tokens, V):
    """Count what follows what. Returns row(context): the distribution [V] of the token after the last 0, 1 or 2 tokens."""
    followers = defaultdict(list)
    for a, b, c in zip(tokens, tokens[1:], tokens[2:]):
        for context in ((), (b,), (a, b)):
            followers[context].append(c)

    @lru_cache(maxsize=4096)
    def row(context):
        if context not in followers:
            return row(context[1:])
        seen = torch.bincount(torch.tensor(followers[context]), minlength=V) / len(followers[context])
        trust = TRUST[len(context)]
        return trust * seen + (1 - trust) * row(context[1:]) if context else seen

    return row


def propose(row, histories, generator):
    """Draw K drafts for each sequence, one after another: the drafts [B, K] and the rows they came from [B, K, V]."""
    tokens, probs = torch.tensor([history[-1:] for history in histories]), []
    for _ in range(K):
        probs.append(torch.stack([row((last,)) for last in tokens[:, -1].tolist()]))
        tokens = torch.cat((tokens, torch.multinomial(probs[-1], 1, generator=generator)), 1)
    return tokens[:, 1:], torch.stack(probs, 1)


def score(row, histories, drafts):
    """The target's one pass: its rows at each draft and after the last, [B, K + 1, V]."""
    tokens = torch.cat((torch.tensor([history[-2:] for history in histories]), drafts), 1)  # [B, K + 2]
    contexts = tokens.unfold(1, 2, 1).tolist()  # [B, K + 1, 2]
    return torch.stack([torch.stack([row(tuple(context)) for context in sequence]) for sequence in contexts])


def law(drafts, draft_probs, target_probs):
    """P(accepted = n) given the drafts, [B, K + 1]: the first n stand, each with a = min(1, p / q), and the next does not."""
    q, p = (probs[:, :K].gather(2, drafts[..., None])[..., 0].double() for probs in (draft_probs, target_probs))
    a = (p / q).clamp(max=1)
    return pad(a.cumprod(1), (1, 0), value=1.0) * (1 - pad(a, (0, 1)))


class Step(NamedTuple):
    equal: bool  # to the rule, in both outputs of every sequence
    accepted: torch.Tensor  # [B]
    law: torch.Tensor  # [B, K + 1]
    seconds: float
    reference_seconds: float


def timed(inputs, impl):
    """verify's two outputs, and the seconds until they were on the CPU."""
    start = time.perf_counter()
    accepted, next_token = (x.cpu() for x in sv.verify(*inputs, impl=impl))
    return accepted, next_token, time.perf_counter() - start


def decode(text, steps, seed, device):
    """Decode B sequences and print the first as it grows. Returns the Steps."""
    vocabulary = sorted(set(text))
    number = {token: i for i, token in enumerate(vocabulary)}
    row = count([number[token] for token in text], len(vocabulary))
    generator = torch.Generator().manual_seed(seed)
    histories = [[number["."], number["\n"]] for _ in range(B)]
    done, column = [], WIDTH
    for step in range(1, steps + 1):
        drafts, draft_probs = propose(row, histories, generator)
        target_probs = score(row, histories, drafts)
        bits = [torch.empty(B, n, dtype=torch.int64).random_(generator=generator) for n in (K, K + 1)]
        inputs = [x.to(device) for x in (drafts, draft_probs, target_probs, *bits)]
        *expected, reference_seconds = timed(inputs, "reference")
        *(accepted, next_token), seconds = timed(inputs, "auto")
        equal = torch.equal(accepted, expected[0]) and torch.equal(next_token, expected[1])
        done.append(Step(equal, accepted, law(drafts, draft_probs, target_probs), seconds, reference_seconds))
        if not equal:
            print(f"\nstep {step} differs from the rule: {accepted}, {next_token}, expected {expected}")
        for history, draft, n, token in zip(histories, drafts.tolist(), accepted.tolist(), next_token.tolist()):
            history += draft[:n] + [token]
        column = show(step, [vocabulary[token] for token in histories[0][-1 - accepted[0] :]], column)
    print("\n")
    return done


def show(step, words, column):
    """Print what a step gave the first sequence, on a new line where the old one is full. Returns the column reached."""
    *accepted, next_token = (word.replace("\n", " ¶") for word in words)
    width = len("".join(accepted) + next_token) + 2
    if column + width > WIDTH:
        print(f"\nstep {step:5}  ", end="")
        column = 12
    print(marked("".join(accepted)) + next_token, end="", flush=True)
    return column + width


def marked(accepted):
    """Green on a terminal and in brackets elsewhere, but for the first space."""
    left, right = ("\033[32m", "\033[0m") if sys.stdout.isatty() else "[]"
    return re.sub("( ?)(.+)", rf"\1{left}\2{right}", accepted)


def report(done, device):
    """Print what was checked and measured. Returns how many drafts were accepted how often, and what the law expects."""
    accepted, laws = torch.cat([step.accepted for step in done]), torch.cat([step.law for step in done])
    measured, expected = torch.bincount(accepted, minlength=K + 1).double(), laws.sum(0)  # [K + 1]
    # Each verification is one draw from its own law, so the counts vary by the sum of the draws' covariances.
    difference, covariance = measured - expected, expected.diag() - laws.T @ laws
    chi_square = difference @ torch.linalg.pinv(covariance, rtol=1e-9, hermitian=True) @ difference
    chance = torch.special.gammaincc(torch.tensor(K / 2), chi_square / 2)

    print(f"{sum(step.equal for step in done)} of {len(done)} steps equal to the rule, bit for bit")
    print(f"{1 + accepted.double().mean():.2f} tokens per target pass and sequence, of at most {K + 1}")
    for name, seconds in ((f"verify on {device}", "seconds"), ("reference", "reference_seconds")):
        milliseconds = 1e3 * torch.tensor([getattr(step, seconds) for step in done])
        low, median, high = milliseconds.quantile(torch.tensor([0.25, 0.5, 0.75]))
        print(f"{name}: {median:.2f} ms a step (quartiles {low:.2f} and {high:.2f})")
    print("\naccepted  measured       law      z")
    for n, z in enumerate(difference / covariance.diag().sqrt()):
        print(f"{n:8} {measured[n]:9.0f} {expected[n]:9.1f} {z:6.2f}")
    verdict = "agree" if chance > 0.001 else "DISAGREE"
    print(f"Chi-square {chi_square:.2f} with {K} degrees of freedom, p = {chance:.3f}: measurement and law {verdict}.")
    return measured, expected


def draw(measured, expected, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.bar(range(K + 1), measured.tolist(), width=0.6, color="#9ecae1", label="measured")
    label = r"law, given the drafts: $a_0 \cdots a_{n-1}\,(1 - a_n)$"
    axes.plot(range(K + 1), expected.tolist(), "D", color="#d94801", label=label)
    axes.set(xlabel="drafts accepted", ylabel="verifications", title=f"{measured.sum():,.0f} verifications of {K} drafts")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"The histogram is in {path}.")


def main():
    gpu = next((name for name in ("cuda", "xpu") if getattr(torch, name).is_available()), "cpu")
    parser = argparse.ArgumentParser(description="Decode real text speculatively and check every step against the rule.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=gpu)
    parser.add_argument("--png", default="demo.png", metavar="PATH")
    options = parser.parse_args()

    print(f"The first of {B} sequences: {marked('accepted drafts')} and the token that verify drew after them.")
    done = decode(read_tokens(), options.steps, options.seed, options.device)
    draw(*report(done, options.device), options.png)
    return 0 if all(step.equal for step in done) else 1


if __name__ == "__main__":
    torch.set_num_threads(1)  # rows this short gain nothing from more threads
    sys.exit(main())
