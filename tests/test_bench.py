"""The benchmark runs as documented, prints what its file holds, and reports no time behind a wrong implementation."""

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import spec_verify_xpu as sv
from spec_verify_xpu import eager, ops

BENCH = Path(__file__).parents[1] / "benchmarks" / "bench.py"
BENCH_LOGITS = BENCH.with_name("bench_logits.py")
# A compiler takes longer than all these tests, so torch.compile is left out. FlashInfer stands for a peer that cannot run.
PROVIDERS = ["eager", "eager-route", "flashinfer"]


def run(*arguments, script=BENCH):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A finished run and its file. Two shapes, so that a batch under 8 draws several seeds, and one over 64 repeats."""
    path = tmp_path_factory.mktemp("bench") / "results.json"
    shapes = ("--shapes", "3,2,100 70,1,50")
    finished = run("--device", "cpu", *shapes, "--iterations", 4, "--providers", *PROVIDERS, "--json", path)
    assert finished.returncode == 0, finished.stderr
    return finished, path


def test_file(timed):
    report = json.loads(timed[1].read_text())
    assert report["device"] == "cpu" and report["packages"]["torch"] == torch.__version__
    assert {"name", "driver", "cores", "threads", "python", "commit", "date"} <= report.keys()
    assert [(x["batch"], x["drafts"], x["vocabulary"], x["dtype"]) for x in report["shapes"]] == [
        (3, 2, 100, "float32"),
        (70, 1, 50, "float32"),
    ]
    for shape in report["shapes"]:
        entries = shape["batch"] * shape["vocabulary"]
        assert 4 * entries <= shape["bytes"] <= 8 * entries  # one row a sequence if all accept, two if none does
        assert list(shape["providers"]) == ["stream", *PROVIDERS]
        for name in ("eager", "eager-route"):
            warm, times = (shape["providers"][name][kind] for kind in ("warm_us", "wall_us"))
            assert 0 < warm["lower"] <= warm["median"] <= warm["upper"] and warm["n"] == 4
            assert 0 < times["lower"] <= times["median"] <= times["upper"] and times["n"] == 4
        assert shape["providers"]["flashinfer"].keys() == {"not_run"}


def test_render(timed):
    """The tables come from the file alone, and pictures lie beside it."""
    finished, path = timed
    rendered = run("--render", path)
    assert rendered.returncode == 0, rendered.stderr
    assert rendered.stdout == finished.stdout
    assert "| flashinfer | not run: " in rendered.stdout
    for picture in (".vocabulary.png", ".floor.png"):
        assert path.with_suffix(picture).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("temperature", [1, 0.5], ids=str)  # 1 takes a shorter way to probabilities
def test_logits(temperature, tmp_path):
    """A finished run and its file: both dtypes, one shape of less than 8 sequences, which draws several seeds."""
    path, providers = tmp_path / "results.json", ("ours", "softmax+verify", "softmax+flashinfer")
    options = ("--device", "cpu", "--shapes", "3,2,100", "--iterations", 2, "--temperature", temperature, "--json", path)
    finished = run(*options, "--providers", *providers, script=BENCH_LOGITS)
    assert finished.returncode == 0, finished.stderr
    assert "softmax+verify / ours" in finished.stdout
    shapes = json.loads(path.read_text())["shapes"]
    assert [(x["dtype"], x["bytes"], x["temperature"]) for x in shapes] == [
        ("bfloat16", 2 * 3 * 5 * 100, temperature),
        ("float32", 4 * 3 * 5 * 100, temperature),
    ]
    for shape in shapes:
        assert tuple(shape["providers"]) == providers
        assert all("wall_us" in shape["providers"][name] for name in providers[:2])


@pytest.fixture
def bench_logits(monkeypatch):
    monkeypatch.syspath_prepend(BENCH.parent)
    return importlib.import_module("bench_logits")


def test_gate_of_logits(bench_logits):
    """Ours must equal what is expected; a peer must stay in range, and draw what has mass."""
    batch = bench_logits.random_batch(3, 2, 50, torch.float32, "cpu", 1.0, 0)
    expected = bench_logits.by_eager(batch, 1.0)
    bench_logits.gate("ours", batch, expected, expected, 1.0)
    with pytest.raises(SystemExit, match="differs from eager"):
        bench_logits.gate("ours", batch, (expected.accepted, expected.next_token + 1), expected, 1.0)
    bench_logits.gate("peer", batch, tuple(expected), None, 1.0)
    for wrong in ((expected.accepted + 3, expected.next_token), (expected.accepted, expected.next_token + 50)):
        with pytest.raises(ValueError, match="out of range"):
            bench_logits.gate("peer", batch, wrong, None, 1.0)


def test_parts_of_a_call(bench_logits, device):
    """The first kernels of a call alone are launched, and afterwards all of them again."""
    launch = pytest.importorskip("spec_verify_xpu.gpu.launch")
    batch = bench_logits.random_batch(1, 1, 50, torch.float32, device, 1.0, 0)  # rows of two positions, which are one stage
    call = functools.partial(sv.verify_logits, *batch, impl="triton")
    kernels = ["weigh_blocks", "share_rows", "sum_residual", "draw"]
    launched, run = [], launch.launch
    with mock.patch.object(launch, "launch", lambda launches, *more: launched.append(launches) or run(launches, *more)):
        for count in (1, 3, None):
            with bench_logits.only_first(count) as names:
                call()
            assert names == kernels
    assert [[x.kernel.__name__ for x in launches] for launches in launched] == [kernels[:1], kernels[:3], kernels]
    assert bench_logits.equal(call(), bench_logits.by_eager(batch, 1.0))


@pytest.fixture
def bench(monkeypatch):
    """The module, and nothing cached of what the tests change."""
    monkeypatch.syspath_prepend(BENCH.parent)
    ops.implementation.cache_clear()
    yield importlib.import_module("bench")
    ops.implementation.cache_clear()


def test_pictures_of_a_gpu(bench, timed, tmp_path):
    """Of a GPU it is the device's times that count."""
    report = json.loads(timed[1].read_text())
    report["device"] = "cuda"
    for shape in report["shapes"]:
        for provider in ("eager", "eager-route"):
            shape["providers"][provider]["device_us"] = {"lower": 3.0, "median": 4.0, "upper": 5.0, "n": 4}
        shape["providers"]["stream"] = {"device_us": {"lower": 1.0, "median": 2.0, "upper": 3.0, "n": 4}}
    bench.pictures(report, tmp_path / "gpu.json")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["gpu.floor.png", "gpu.vocabulary.png"]
    row = next(line for line in bench.tables(report).splitlines() if line.startswith("| eager |"))
    assert row.startswith("| eager | 4.00 (3.00 to 5.00) |")
    assert row.split("|")[-4:-1] == [" 1.00 ", " 0.50 ", f" {report['shapes'][0]['bytes'] / 4e3:.2f} "]


@pytest.mark.parametrize("output", [0, 1], ids=["accepted", "next_token"])
def test_gate(bench, monkeypatch, capsys, tmp_path, output):
    """One wrong number of one sequence is enough."""
    right = eager.verify

    def wrong(call):
        right(call)
        result = (call.accepted, call.next_token)[output]
        result[2] = (result[2] + 1) % 3

    monkeypatch.setattr(eager, "verify", wrong)
    path = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--shapes", "3,2,100", "--providers", *PROVIDERS, "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert "eager differs from the rule" in end.value.code  # a message, so the status is 1
    assert capsys.readouterr().out == ""
    assert not path.exists()


def test_gate_of_peers(bench):
    """A peer that takes the rule's uniforms accepts its drafts; one that does not draws, at least, what has mass."""
    draft = torch.tensor([[[0.5, 0.5, 0.0]]])
    target = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]])
    batch = (torch.tensor([[1]]), draft, target)
    expected = bench.sv.VerifyResult(torch.tensor([0]), torch.tensor([2]))
    bench.gate("eager-route", batch, (torch.tensor([0]), torch.tensor([2])), expected)
    bench.gate("flashinfer", batch, torch.tensor([[1, 0]]), expected)
    bench.gate("flashinfer", batch, (torch.tensor([[2, 7]]), torch.tensor([1])), expected)  # past the count nothing was written
    bench.gate("transformers", batch, [torch.tensor([[1, 0]])], expected)
    with pytest.raises(ValueError, match="accepted differs"):
        bench.gate("eager-route", batch, (torch.tensor([1]), torch.tensor([0])), expected)
    for tokens in ([[0, -1]], [[1, 1]]):  # nothing is left of token 0 after a rejection, and none is in the last row
        with pytest.raises(ValueError, match="no mass"):
            bench.gate("flashinfer", batch, torch.tensor(tokens), expected)
