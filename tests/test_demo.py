"""The demo runs as documented, its models and its law are what it says, and a wrong verify does not pass."""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spec_verify_xpu as sv

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(DEMO.parent)
    return importlib.import_module("demo")


def test_runs(tmp_path):
    png = tmp_path / "demo.png"
    command = [sys.executable, str(DEMO), "--steps", "20", "--png", str(png)]
    run = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "20 of 20 steps equal to the rule" in run.stdout
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def wrong_accepted(result, V):
    result.accepted[3] = (result.accepted[3] + 1) % 5


def wrong_token(result, V):
    result.next_token[3] = (result.next_token[3] + 1) % V


@pytest.mark.parametrize("spoil", [wrong_accepted, wrong_token])
def test_one_wrong_number_in_one_step_is_an_error(spoil, monkeypatch, tmp_path, capsys):
    verify, calls = sv.verify, []

    def wrong_once(*inputs, impl):
        result = verify(*inputs, impl=impl)
        calls.append(impl)
        if calls.count("auto") == 2 and impl == "auto":
            spoil(result, inputs[2].shape[2])
        return result

    monkeypatch.setattr(sv, "verify", wrong_once)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # the other tests keep theirs
    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "3", "--png", str(tmp_path / "demo.png")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(DEMO), run_name="__main__")
    assert end.value.code == 1
    output = capsys.readouterr().out
    assert "step 2 differs from the rule" in output
    assert "2 of 3 steps equal to the rule" in output


def test_models_are_distributions(demo):
    """Every word has mass, and a row sums to 1 but for the few roundings to float32, of 2**-24 each, that made its entries."""
    text = demo.read_tokens()
    vocabulary = sorted(set(text))
    tokens = [vocabulary.index(token) for token in text]
    row = demo.count(tokens, len(vocabulary))
    pairs = list(zip(tokens, tokens[1:]))[::10]  # the whole would take ten times as long
    for context in [(), *((token,) for token in set(tokens)), *pairs, (0, 0)]:  # and a pair that never occurs
        assert (row(context) > 0).all()
        assert (row(context).double().sum() - 1).abs() <= 8 * 2**-24


def test_counts_by_hand(demo):
    """Four transitions: 0 or 2 after (1, 0), so 1 or 2 after 0; always 0 after 1. Halves of halves are exact."""
    row = demo.count([0, 1, 0, 1, 0, 2], 3)
    assert row(()).tolist() == [1 / 2, 1 / 4, 1 / 4]
    assert row((1,)).tolist() == [31 / 32, 1 / 64, 1 / 64]
    assert row((2, 1)).tolist() == row((1,)).tolist()  # never seen, so only the last token counts


def test_law_by_hand(demo):
    """a = 1 (the target likes the token more), 1/2, 1, 0: the second draft ends it half the time, else the fourth."""
    q = torch.tensor([[[0.25, 0.75], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    p = torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.5, 0.5], [0.0, 1.0], [0.5, 0.5]]])
    drafts = torch.zeros(1, 4, dtype=torch.int64)
    assert demo.law(drafts, q, p).tolist() == [[0, 0.5, 0, 0.5, 0]]
