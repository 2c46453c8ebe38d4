"""What only a GPU can show: capture, no waiting, streams, the launch's device, the hub variant. `make test-gpu`."""

import dataclasses
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

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


@pytest.fixture
def keeps_launches(device, monkeypatch):
    """Nothing is known or kept yet, on a device where launches are kept."""
    handles = pytest.importorskip("spec_verify_xpu.gpu.handles")
    if not handles.keeps_launches(device):
        pytest.skip("how this Triton launches on this device is not known")
    monkeypatch.setattr(sv.repeats, "known", {})
    monkeypatch.setattr(handles, "kept_launches", kept := {})
    monkeypatch.setattr(importlib.import_module("spec_verify_xpu.gpu.launch"), "kept_launches", kept)
    empty = sv.repeats.EMPTY["cuda"]
    monkeypatch.setitem(sv.repeats.EMPTY, "cuda", lambda *x: empty(*x).fill_(-77))  # as conftest poisons torch.empty
    return kept


@pytest.fixture
def dispatched(monkeypatch):
    """A list that grows with each call that goes through the operator."""
    calls, verify = [], sv.ops.run_verify
    monkeypatch.setattr(sv.api, "ops", SimpleNamespace(verify=lambda *x: calls.append(x) or verify(*x), emit=sv.ops.ops.emit))
    return calls


def serving_calls(device):
    """{name: (function, arguments, options)}: every set of tensors that a repeated call may bring."""
    batch = random_batch(6, 4, 4096, dtype=torch.bfloat16, tokens=torch.int32).to(device)
    odd = random_batch(6, 4, 4095).to(device)
    dense, flat = batch[:5], [x.flatten(0, 1) for x in batch[:3]]
    ends, numbers = (torch.arange(7) * 4).to(device), torch.arange(6, device=device)
    seeds = {"seed": numbers, "offset": numbers + 9}

    def integers(*shape):
        return torch.empty(shape, dtype=torch.int32, device=device)

    return {
        "dense": (sv.verify, dense, {}),
        "odd": (sv.verify, odd[:5], {"dtype": torch.int32}),
        "one_hot": (sv.verify, (dense[0], None, *dense[2:]), {"lengths": numbers % 5}),
        "out": (sv.verify, dense, {"out": (integers(6), integers(6))}),
        "emitted": (sv.verify, dense[:3], {**seeds, "emitted": integers(6, 5)}),
        "ragged": (sv.verify_varlen, (*flat, ends, 4), seeds),
        "all": (
            sv.verify_varlen,
            (*flat, ends, 4),
            {**seeds, "greedy": numbers % 2 == 0, "emitted": integers(6, 5), "out": (integers(6), integers(6))},
        ),
    }


@pytest.mark.parametrize("name", ["dense", "odd", "one_hot", "out", "emitted", "ragged", "all"])
def test_a_repeated_call_is_only_launched(name, device, keeps_launches, dispatched):
    """The first of a layout goes through the operator, the next do not, and they see what the tensors hold then."""
    function, arguments, options = serving_calls(device)[name]
    expected = function(*arguments, **{**options, "out": None, "emitted": None}, impl="eager")
    versions = [x._version for x in options.get("out", ())]
    for _ in range(3):
        for x in [*options.get("out", ()), options.get("emitted", arguments[0].clone())]:
            x.fill_(-7)
        result = function(*arguments, **options)
        assert [x.tolist() for x in result] == [x.tolist() for x in expected]
        dtype = options["out"][0].dtype if "out" in options else options.get("dtype", torch.int64)
        assert {x.dtype for x in result} == {dtype}
        if "emitted" in options:
            drafts = arguments[0].view(6, 4)
            assert torch.equal(options["emitted"], sv.emit(drafts, *expected, impl="eager").to(torch.int32))
        assert len(dispatched) == 2  # the first, and eager's
    assert all(x._version > before for x, before in zip(options.get("out", ()), versions))
    arguments[2][:] = arguments[2].flip(-1)
    expected = function(*arguments, **{**options, "out": None, "emitted": None}, impl="eager")
    assert [x.tolist() for x in function(*arguments, **options)] == [x.tolist() for x in expected]
    assert len(dispatched) == 3


def test_a_call_that_only_looks_alike_goes_the_whole_way(device, keeps_launches, dispatched):
    """Other strides, addresses, dtypes, options or kinds of tensors than those of the call that is known."""
    batch = random_batch(3, 4, 4096).to(device)
    expected = [x.tolist() for x in batch.verify("eager")]
    tokens, target = batch.draft_tokens, batch.target_probs
    wide = torch.empty(3, 5, 4112, device=device)
    wide[..., :4096] = target
    moved = torch.empty(target.numel() + 1, device=device)[1:].view(3, 5, 4096)  # off its alignment
    moved.copy_(target)

    class Subclass(torch.Tensor):
        pass

    with torch.inference_mode():
        inference = target.clone()
    alike = {
        "strides": {"target_probs": wide[..., :4096]},
        "address": {"target_probs": moved},
        "tokens": {"draft_tokens": tokens.int()},
        "grad": {"target_probs": target.clone().requires_grad_()},
        "subclass": {"target_probs": target.as_subclass(Subclass)},
        "inference": {"target_probs": inference},
        "dtype": {"dtype": torch.int32},
        "lengths": {"lengths": torch.full((3,), 4, device=device)},
        "generator": {"generator": torch.Generator(device)},
    }
    inputs = dict(zip(batch._fields, batch[:5]))
    for change in alike.values():
        sv.repeats.known.clear()
        sv.verify(**inputs)
        before = len(dispatched)
        result = sv.verify(**{**inputs, **change})
        assert len(dispatched) == before + 1, change.keys()
        assert [x.tolist() for x in result] == expected
        assert [x.tolist() for x in sv.verify(**inputs)] == expected


def test_a_dispatch_mode_sees_every_call(device, keeps_launches):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(str(function))
            return function(*arguments, **(options or {}))

    batch = random_batch(3, 4, 64).to(device)
    for known in (False, True):  # known after the first round, in which the mode was on as well
        for _ in range(2):
            with Mode():
                batch.verify("triton")
        assert sum("verify" in name for name in seen) == 2 + 2 * known
        batch.verify("triton")
        batch.verify("triton")


def test_repeated_calls_of_many_threads(device, keeps_launches):
    """With rows of their own in tensors laid out alike, on streams of their own but for one; none has used the GPU before."""
    batches = [random_batch(8, 5, 1024, seed=s).to(device) for s in range(8)]
    expected = [torch.stack(batch.verify("triton")) for batch in batches]
    torch.cuda.synchronize()
    wrong = []

    def serve(i):
        with torch.cuda.stream(torch.cuda.Stream() if i else None):
            results = [torch.stack(batches[i].verify("triton")) for _ in range(300)]
            torch.cuda.current_stream().synchronize()
        wrong.extend(i for x in results if not torch.equal(x, expected[i]))

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(sv.repeats.known) == 1


def test_a_launch_that_fails_says_so(device, keeps_launches):
    batch = random_batch(3, 4, 64).to(device)
    batch.verify("triton")
    (kept,) = keeps_launches.values()
    launches, (settings, _) = list(kept.launches), kept.launches[0]
    kept.launches[0] = settings, lambda: 700
    with pytest.raises(RuntimeError, match="could not launch"):
        batch.verify("triton")
    kept.launches[:] = launches
    assert [x.tolist() for x in batch.verify("triton")] == [x.tolist() for x in batch.by_rule()]


def test_where_launches_are_not_kept_triton_launches(device, keeps_launches, monkeypatch):
    launch = sys.modules["spec_verify_xpu.gpu.launch"]
    facts = dataclasses.replace(launch.device_facts(torch.empty(0, device=device).device), keeps=False)
    monkeypatch.setattr(launch, "device_facts", lambda device: facts)
    batch = random_batch(3, 4, 64).to(device)
    for _ in range(2):
        assert [x.tolist() for x in batch.verify("triton")] == [x.tolist() for x in batch.by_rule()]
    assert not keeps_launches and not sv.repeats.known


@pytest.mark.parametrize(
    "verify, kernels, most",
    [("verify", "kernels sum_chunks locate", 8), ("verify_logits", "logits weigh_blocks share_rows sum_residual draw", 18)],
    ids=["probs", "logits"],
)
def test_nothing_is_compiled_twice(verify, kernels, most, device, keeps_launches):
    """warmup, then 200 shapes, odd vocabularies and rows that are not aligned among them: few kernels in all, and none late.

    In a process of its own, where nothing is compiled yet.
    """
    module, *names = kernels.split()
    code = f"""
import random
import torch
import spec_verify_xpu as sv
from spec_verify_xpu.gpu.{module} import {", ".join(names)}

def compiled():
    return sum(len(cache[0]) for kernel in ({", ".join(names)}) for cache in kernel.device_caches.values())

print("seconds:", sv.warmup("{device}", uniforms=torch.float32, logits={verify == "verify_logits"}))
warm, r = compiled(), random.Random(0)
for i in range(200):
    B, K, V = r.choice([1, 2, 7, 33]), r.randint(1, 16), r.choice([r.randint(1, 2**19 - 1), 16 * r.randint(1, 2**15 - 1)])
    shift = i % 3 == 0  # rows off their alignment
    draft, target = (torch.rand(B * n * V + 1, device="{device}")[shift:][: B * n * V].view(B, n, V) for n in (K, K + 1))
    uniforms = (torch.rand(B, n, device="{device}") for n in (K, K + 1))
    sv.{verify}(torch.randint(V, (B, K), device="{device}"), draft, target, *uniforms)
assert compiled() == warm <= {most}, (warm, compiled())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
