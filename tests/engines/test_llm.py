"""What the demo says of a verification: the law it holds it to, by hand and by chance."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import laws
import spec_verify_xpu as sv

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
