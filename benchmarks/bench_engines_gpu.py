"""The plugin for vLLM beside vLLM's own functions on a GPU, V1's and V2's: python benchmarks/bench_engines_gpu.py

Both get the same tensors, in one process, in rounds of random order: a call's microseconds on the host, on the wall with a
synchronisation, and on the device where a graph can hold it. What is said of correctness is in tests/engines.
"""

import functools
import os

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


def compare(name, stock, ours, inputs):
    calls = {"vLLM": [functools.partial(stock, *inputs)], "plugin": [functools.partial(ours, *inputs)]}
    cells = []
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
        medians = {who: x["median"] for who, x in bench.interleaved(clocks, ROUNDS).items()}
        cells += [", ".join(f"{medians[who]:,.1f}" if who in medians else "" for who in calls)]
    print("|", " | ".join([name, *cells]), "|", flush=True)


@torch.inference_mode()
def main():
    import vllm.v1.sample.rejection_sampler as sampler
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils as sampler_v2

    from spec_verify_engines import vllm, vllm_v2

    print("| requests, drafts, vocabulary | host, us: vLLM, plugin | wall | device |\n| --- | --- | --- | --- |")
    for B, K, V in SHAPES:
        for has_probs in (True, False):
            name = f"V1: {B}, {K}, {V:,}, {'with' if has_probs else 'without'} probabilities"
            ours = vllm.in_place_of(sampler.rejection_sample)
            compare(name, sampler.rejection_sample, ours, of_v1(B, K, V, has_probs, False))
        for dtype in (torch.bfloat16, torch.float32):
            for has_draft in (True, False):
                name = f"V2: {B}, {K}, {V:,}, {dtype}, {'with' if has_draft else 'without'} draft logits"
                ours = vllm_v2.in_place_of(sampler_v2.rejection_sample)
                compare(name, sampler_v2.rejection_sample, ours, of_v2(B, K, V, dtype, has_draft))


if __name__ == "__main__":
    main()
