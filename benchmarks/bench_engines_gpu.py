"""The plugin for vLLM beside vLLM's own functions on a GPU, V1's and V2's.

    python benchmarks/bench_engines_gpu.py --json results.json

Both get the same tensors, in one process, in rounds of random order: a call's microseconds on the host, on the wall with a
synchronisation, and on the device where a graph can hold it. What is said of correctness is in tests/engines.
"""

import argparse
import functools
import itertools
import json
import os
from pathlib import Path

import bench
import bench_logits
import torch
from bench_engines import arguments

os.environ["VLLM_PLUGINS"] = ""
DEVICE, ROUNDS = "cuda", 20
SHAPES = (1, 4, 128_256), (8, 4, 128_256), (64, 4, 128_256)  # requests, drafts of each, vocabulary


def of_v1(B, K, V, has_probs, mixed):
    *tensors, metadata = arguments(B, K, V, has_probs, mixed)
    metadata.temperature = metadata.temperature.to(DEVICE)
    return [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in tensors] + [metadata]


def of_v2(B, K, V, dtype, has_draft):
    """Requests of temperature 1, whose logits need no processing."""
    tokens, draft, target, *_ = bench_logits.random_batch(B, K, V, dtype, DEVICE, 1.0, 0)
    return target.flatten(0, 1), draft if has_draft else None, *bench_logits.layout_of_v2(tokens, 1.0)


def compare(stock, ours, inputs):
    """Quartiles: {kind of time: {whose: ..}}."""
    calls = {"vLLM": [functools.partial(stock, *inputs)], "plugin": [functools.partial(ours, *inputs)]}
    times = {}
    for kind in ("host", "wall", "device"):
        clocks = {}
        for who, call in calls.items():
            call[0]()
            try:
                if kind == "device":
                    clocks[who] = bench.device_clock(call, torch.cuda)
                else:
                    clocks[who] = bench.clock(call, torch.cuda, 1, kind == "wall")
            except RuntimeError:  # what reads the host's memory is in no graph
                torch.cuda.synchronize()
        times[f"{kind}_us"] = bench.interleaved(clocks, ROUNDS)
    return times


def row(name, times):
    cells = [name]
    for kind in times.values():
        cells += [", ".join(f"{kind[who]['median']:,.1f}" if who in kind else "" for who in ("vLLM", "plugin"))]
    return f"| {' | '.join(cells)} |"


def cases():
    """(name, vLLM's function, ours, what both are given)"""
    import vllm.v1.sample.rejection_sampler as sampler
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils as sampler_v2

    from spec_verify_engines import vllm, vllm_v2

    pair = sampler.rejection_sample, vllm.in_place_of(sampler.rejection_sample)
    pair_v2 = sampler_v2.rejection_sample, vllm_v2.in_place_of(sampler_v2.rejection_sample)
    for B, K, V in SHAPES:
        shape = f"{B}, {K}, {V:,}"
        for has_probs in (True, False):
            yield f"V1: {shape}, {'with' if has_probs else 'without'} probabilities", *pair, of_v1(B, K, V, has_probs, False)
        for dtype, has_draft in itertools.product((torch.bfloat16, torch.float32), (True, False)):
            name = f"V2: {shape}, {str(dtype).split('.')[1]}, {'with' if has_draft else 'without'} draft logits"
            yield name, *pair_v2, of_v2(B, K, V, dtype, has_draft)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH")
    path = parser.parse_args().json
    report = {**bench.machine(DEVICE, torch.cuda.get_device_properties()), "cases": {}}
    print("| requests, drafts, vocabulary | host, us: vLLM, plugin | wall | device |\n| --- | --- | --- | --- |")
    for name, *case in cases():
        report["cases"][name] = times = compare(*case)
        print(row(name, times), flush=True)
        if path:
            path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
