"""What only a GPU can show: capture, no waiting, streams, the launch's device, the hub variant. `make test-gpu`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spec_verify_xpu as sv
from batches import random_batch

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def needs_gpu(device):
    if device.type == "cpu":
        pytest.skip("needs a GPU: make test-gpu")


def graph_of(call, device):
    """Warm up, capture call() and return (graph, what call returned)."""
    module = torch.get_device_module(device)
    call()
    module.synchronize()
    graph = module.CUDAGraph() if device.type == "cuda" else module.XPUGraph()
    with module.graph(graph):
        result = call()
    return graph, result


def test_auto_takes_triton(device):
    assert sv.ops.implementation(device.type, "auto").__name__.endswith("launch")


@pytest.mark.parametrize("V", [32000, 4095], ids=["wide_loads", "odd"])
def test_graph_replays_with_new_inputs(V, impl, device):
    """Captured once, replayed with inputs changed in place."""
    batches = [random_batch(8, 5, V, seed=s) for s in range(4)]
    static = batches[0].to(device)
    graph, result = graph_of(lambda: static.verify(impl), device)
    for batch in batches[1:]:
        for x, y in zip(static[:5], batch):
            x.copy_(y)
        graph.replay()
        assert [x.tolist() for x in result] == [x.tolist() for x in batch.by_rule()]


def serving_step(device, impl):
    """A ragged step as an engine captures it, greedy sequences among random ones: (step, offset, emitted)."""
    batch = random_batch(6, 4, 4095)
    tokens, draft, target = (x.flatten(0, 1).to(device) for x in batch[:3])
    ends = (torch.arange(7) * 4).to(device)
    seed, offset = torch.arange(6, device=device), torch.zeros(6, dtype=torch.int64, device=device)
    greedy = torch.tensor([False, True] * 3, device=device)
    emitted = torch.empty(6, 5, dtype=torch.int32, device=device)
    out = tuple(torch.empty(6, dtype=torch.int32, device=device) for _ in range(2))

    def step():
        where = {"greedy": greedy, "out": out, "emitted": emitted}
        return sv.verify_varlen(tokens, draft, target, ends, 4, seed=seed, offset=offset, impl=impl, **where)

    return step, offset, emitted


def test_graph_of_a_serving_step(impl, device):
    """The captured step draws anew as its offsets advance, and as a call by the reference does."""
    step, offset, emitted = serving_step(device, impl)
    graph, result = graph_of(step, device)
    reference, reference_offset, reference_emitted = serving_step("cpu", "reference")
    seen = set()
    for _ in range(8):
        graph.replay()
        reference()
        assert torch.equal(emitted.cpu(), reference_emitted)
        seen.add(tuple(result.next_token.tolist()))
        offset += 1
        reference_offset += 1
    assert len(seen) > 1


@pytest.mark.parametrize("name", ["verify_varlen", "verify_greedy", "sample", "emit", "metrics"])
def test_no_serving_call_waits_for_the_device(name, impl, device):
    if device.type != "cuda":
        pytest.skip("torch has this check for CUDA alone")
    step, _, _ = serving_step(device, impl)
    batch = random_batch(8, 5, 1000).to(device)
    result = batch.verify(impl)
    lengths = torch.full((8,), 5, device=device)

    def metrics():
        sv.statistics(result.accepted, lengths, 5)
        sv.logprobs(sv.emit(batch.draft_tokens, *result, impl=impl), batch.target_probs)

    calls = {
        "verify_varlen": step,
        "verify_greedy": lambda: sv.verify_greedy(batch.draft_tokens, batch.target_probs, lengths=lengths, impl=impl),
        "sample": lambda: sv.sample(batch.target_probs, seed=lengths[:, None].expand(8, 6), offset=3, impl=impl),
        "emit": lambda: sv.emit(batch.draft_tokens, *result, impl=impl),
        "metrics": metrics,
    }
    calls[name]()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls[name]()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("generator", [False, True])
def test_no_call_waits_for_the_device(generator, impl, device):
    """torch raises at any call of its own that would synchronise; Triton's launches never do."""
    if device.type != "cuda":
        pytest.skip("torch has this check for CUDA alone")
    batch = random_batch(8, 5, 1000)._replace(lengths=torch.arange(8) % 6).to(device)
    batch.verify(impl)
    one_hot = batch._replace(draft_probs=None)
    one_hot.verify(impl)
    source = torch.Generator(device).manual_seed(0) if generator else None
    sv.verify(*batch[:3], generator=source, impl=impl)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.verify(impl)
        one_hot.verify(impl)
        sv.verify(*batch[:3], generator=source, impl=impl)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_behind_work_on_the_current_stream(device):
    """Inputs still being written on a side stream: the launch queues behind them, and the second launch behind the first."""
    module = torch.get_device_module(device)
    batches = [random_batch(64, 5, 8193, seed=s).to(device) for s in range(8)]
    expected = [torch.stack(batch.verify("triton")) for batch in batches]
    static = batches[0]._replace(**{name: x.clone() for name, x in batches[0]._asdict().items() if x is not None})
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    results = []
    with module.stream(stream):
        for _ in range(20):
            for batch in batches:
                for x, y in zip(static[:5], batch):
                    x.copy_(y)
                results.append(torch.stack(static.verify("triton")))
    module.synchronize()
    assert all(torch.equal(got, expected[i % 8]) for i, got in enumerate(results))


def test_tensors_on_a_device_that_is_not_current(device):
    module = torch.get_device_module(device)
    if module.device_count() < 2:
        pytest.skip("needs two GPUs; test_ops shows the same with a stand-in")
    batch = random_batch(8, 5, 1000)
    expected = [x.tolist() for x in batch.by_rule()]
    for index in range(module.device_count()):
        result = batch.to(torch.device(device.type, index)).verify("triton")
        assert result.accepted.device.index == index
        assert [x.tolist() for x in result] == expected
    assert module.current_device() == 0


def test_many_rows_at_full_width(impl, device):
    """More rows than the GPU runs at once, at the configuration for many rows."""
    batch = random_batch(300, 4, 32000).to(device)
    reference = sv.verify(*(x.cpu() for x in batch[:5]), impl="eager")
    assert all(torch.equal(x.cpu(), y) for x, y in zip(batch.verify(impl), reference))


def test_more_than_2_to_the_31_entries(device):
    """A dense batch of 2**31 entries and more in half precision: 8.6 GB of target rows."""
    B, K, V = 2**31 // (5 * 32000) + 100, 4, 32000
    g = torch.Generator(device).manual_seed(0)
    target_probs = torch.rand(B, K + 1, V, dtype=torch.float16, device=device, generator=g)
    assert target_probs.numel() > 2**31
    tokens = torch.randint(V, (B, K), device=device, generator=g)
    bits = [torch.empty(B, n, dtype=torch.int64, device=device).random_(generator=g) for n in (K, K + 1)]
    accepted, next_token = sv.verify(tokens, None, target_probs, *bits)
    last = slice(B - 50, B)
    expected = sv.verify(tokens[last], None, target_probs[last], *(u[last] for u in bits), impl="reference")
    assert torch.equal(accepted[last], expected.accepted) and torch.equal(next_token[last], expected.next_token)


def test_hub_variant_of_this_gpu(device, tmp_path):
    """The usage block through get_kernel takes the variant of this torch build, and verifies on the GPU."""
    pytest.importorskip("kernels")
    backend = "rocm" if torch.version.hip else device.type
    subprocess.run([sys.executable, ROOT / "tools/build_hub.py"], check=True)
    code = f"""
import torch
from kernels import get_kernel
sv = get_kernel("phanerozoic/spec-verify-xpu", version=1, trust_remote_code=True)
assert sv.__name__.startswith("_spec_verify_xpu_{backend}_"), sv.__name__
probs = torch.softmax(torch.randn(8, 11, 32000, device="{device}"), -1)
tokens = torch.randint(32000, (8, 5), device="{device}")
bits = [torch.empty(8, n, dtype=torch.int64, device="{device}").random_() for n in (5, 6)]
inputs = (tokens, probs[:, :5], probs[:, 5:], *bits)
assert torch.equal(torch.stack(sv.verify(*inputs)), torch.stack(sv.verify(*inputs, impl="reference")))
"""
    environment = {**os.environ, "LOCAL_KERNELS": f"phanerozoic/spec-verify-xpu={ROOT}", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_kept_kernels_are_run_as_triton_runs_them(device):
    """By its own launch and by the kept handle: the same, also after other shapes and dtypes."""
    handles = pytest.importorskip("spec_verify_xpu.gpu.handles")
    if not handles.keeps_handles(device):
        pytest.skip("this Triton's handles are not known on this device")
    handles.compiled_kernels.clear()
    shapes = [(5, 4096, torch.float32), (3, 4095, torch.float32), (17, 100, torch.bfloat16), (0, 64, torch.float32)]
    batches = [random_batch(5, K, V, dtype=dtype, seed=V).to(device) for K, V, dtype in shapes]
    first = [torch.stack(batch.verify("triton")) for batch in batches]
    kept = len(handles.compiled_kernels)
    again = [torch.stack(batch.verify("triton")) for batch in batches]
    assert len(handles.compiled_kernels) == kept > 0
    assert all(map(torch.equal, first, again))
    assert all(torch.equal(x, torch.stack(batch.verify("eager"))) for x, batch in zip(first, batches))
