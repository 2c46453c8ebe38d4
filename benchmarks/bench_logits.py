"""Time `verify_logits` beside what verifies from logits otherwise, on the same logits in one process, behind a gate.

    python benchmarks/bench_logits.py --json results.json    # two shapes, in bfloat16 and in float32
    python benchmarks/bench_logits.py --temperature 0.7

Before a shape is timed, eager torch must equal rule.py on the first two sequences of every batch (in Python a row of 128,256
logits takes half a second, a table's gate some ten), and ours must equal eager torch on all of them, or the script exits with
1. Peers draw otherwise, by design: what they accept must be in range, and what they draw must have mass in its row.

Times are taken as in bench.py. `stream` reads all logits of a call once and does nothing else: the floor, since nobody can
know a row's softmax without reading it. What each kernel of ours adds is taken from the same calls.
"""

import argparse
import contextlib
import functools
import itertools
import json
import sys
from pathlib import Path
from unittest import mock

import torch
from bench import check_mass, device_clock, gated, interleaved, kinds_of, machine, medians_of, outcome, tables, timed, triton

import spec_verify_xpu as sv

if triton:
    import triton.language as tl

BY_RULE = 2  # sequences of each batch
TILES = (4096, 8192)


def random_batch(B, K, V, dtype, device, temperature, seed):
    """verify_logits's arguments: a target that shares its draft's distribution in part, so that accepted varies from 0 to K."""
    g = torch.Generator(device).manual_seed(seed)
    draft = (2 * torch.randn(B, K, V, device=device, generator=g)).to(dtype)
    q = torch.softmax(draft.float() / temperature, -1)
    p = torch.softmax(2 * torch.randn(B, K + 1, V, device=device, generator=g), -1)
    p[:, :K] = 0.7 * q + 0.3 * p[:, :K]
    draft_tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(B, K)
    uniforms = (torch.rand(B, n, device=device, generator=g) for n in (K, K + 1))
    return draft_tokens, draft, (temperature * (V * p).log()).to(dtype), *uniforms


def probabilities(logits, temperature):
    """As fast as torch makes them: at a temperature of 1 in one pass, with the conversion in it."""
    return torch.softmax(logits if temperature == 1 else logits.float() / temperature, -1, dtype=torch.float32)


# Providers are as in bench.py, and take verify_logits's arguments.


def ours(*batch, temperature):
    return lambda: sv.verify_logits(*batch, temperature=temperature)


def softmax_verify(tokens, draft, target, *uniforms, temperature):
    return lambda: sv.verify(tokens, probabilities(draft, temperature), probabilities(target, temperature), *uniforms)


def softmax_flashinfer(tokens, draft, target, *_, temperature):
    """FlashInfer's chain_speculative_sampling (0.7), deterministic as by default. The kernel draws the uniforms too."""
    from flashinfer.sampling import chain_speculative_sampling

    tokens = tokens.int()
    counts = [torch.zeros_like(tokens[:, 0]) for _ in range(2)]
    seed, offset = (torch.zeros(1, dtype=torch.int64, device=tokens.device) for _ in range(2))  # tensors, for the graph's sake

    def call():
        q, p = probabilities(draft, temperature), probabilities(target, temperature)
        return chain_speculative_sampling(q, tokens, p, *counts, seed=seed, offset=offset)[0]

    return call


def layout_of_v2(tokens, temperature):
    """What vLLM's V2 sampler takes after the logits, of B requests that all have K drafts [B, K]."""
    (B, K), on = tokens.shape, {"device": tokens.device}
    requests, steps = (torch.arange(n, dtype=torch.int32, **on) for n in (B, K + 1))
    request_of, step_of = requests.repeat_interleave(K + 1), steps.repeat(B)  # of each row [B * (K + 1)]
    sampled = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1).int().flatten()  # the last token, then the drafts
    ends = torch.arange(B + 1, dtype=torch.int32, **on) * (K + 1)
    temperatures, seeds = torch.full((B,), float(temperature), **on), torch.arange(B, **on)
    return sampled, ends, step_of.long(), requests, request_of, step_of, temperatures, seeds, K


def vllm_v2(tokens, draft, target, *_, temperature):
    """vLLM's model runner V2 (0.33), from the logits as the models leave them, as its RejectionSampler calls it.

    Uniforms and Gumbel noise are hashes of seed, position and token, in its kernels. The draft's logits are divided by the
    temperature as they are read; the target's before, in a float32 copy, which at a temperature of 1 it does not make.
    """
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    rest = layout_of_v2(tokens, temperature)
    request_of, temperatures = rest[4], rest[6]

    def call():
        rows = target.flatten(0, 1)
        if temperature != 1:
            rows = rows.to(torch.float32, copy=True)
            apply_temperature(rows, request_of, temperatures)
        return rejection_sample(rows, draft, *rest)

    return call


PROVIDERS = {"ours": ours, "softmax+verify": softmax_verify, "softmax+flashinfer": softmax_flashinfer, "vllm-v2": vllm_v2}

if triton:

    @triton.jit
    def stream_kernel(draft, target, sums, draft_size, target_size, BLOCK: tl.constexpr):
        """grid (tiles of both): the sum of a tile; the draft's come first."""
        program, draft_tiles = tl.program_id(0), tl.cdiv(draft_size, BLOCK)
        is_draft = program < draft_tiles
        tile = tl.where(is_draft, program, program - draft_tiles).to(tl.int64)
        at = tile * BLOCK + tl.arange(0, BLOCK)
        rows = draft if is_draft else target
        x = tl.load(rows + at, mask=at < tl.where(is_draft, draft_size, target_size), other=0.0)
        tl.store(sums + program, tl.sum(x.to(tl.float32), 0))


def stream(draft, target, block):
    sums = torch.empty(sum(triton.cdiv(x.numel(), block) for x in (draft, target)), device=draft.device)
    return lambda: stream_kernel[sums.shape](draft, target, sums, draft.numel(), target.numel(), block, num_warps=8)


def equal(a, b):
    return all(map(torch.equal, a, b))


def by_eager(batch, temperature):
    """What eager torch returns, which is what rule.py returns for the first sequences."""
    expected = sv.verify_logits(*batch, temperature=temperature, impl="eager")
    by_rule = sv.verify_logits(*(x[:BY_RULE] for x in batch), temperature=temperature, impl="reference")
    if not equal((x[:BY_RULE] for x in expected), by_rule):
        sys.exit(f"eager differs from the rule, so nothing is reported: {expected}, by the rule {by_rule}")
    return expected


def gate(name, batch, output, expected, temperature):
    """Exit where ours differs from what is expected; raise where a peer's output cannot be right."""
    if name == "ours":
        if not equal(output, expected):
            sys.exit(f"ours differs from eager, so nothing is reported: {output}, by eager {expected}")
        return
    accepted, next_token = outcome(output)
    K, V = batch[1].shape[1:]
    if not all(((x >= 0) & (x < end)).all() for x, end in ((accepted, K + 1), (next_token, V))):
        raise ValueError("accepted or next_token is out of range")
    check_mass(*(probabilities(x, temperature) for x in batch[1:3]), accepted, next_token)


@contextlib.contextmanager
def only_first(count):
    """Within it calls launch the first `count` of their kernels, or all if None. Gives the list of all their names."""
    from spec_verify_xpu import repeats
    from spec_verify_xpu.gpu import launch

    names = []

    def plan(*arguments, whole=launch.plan):
        found = whole(*arguments)
        names[:] = [x.kernel.__name__ for x in found.launches]
        return found._replace(launches=found.launches[:count])

    repeats.known.clear()  # their calls would not be planned
    try:
        with mock.patch.object(launch, "plan", plan):
            yield names
    finally:
        repeats.known.clear()


def parts(calls, module, iterations):
    """What each kernel adds to the device's time, [(name, us)]: graphs hold the first of each call, then the first two, .."""
    with only_first(None) as names:
        calls[0]()
    clocks = {}
    for count in range(1, len(names) + 1):
        with only_first(count):
            clocks[count] = device_clock(calls, module)
    found = interleaved(clocks, iterations)
    medians = [0, *(found[count]["median"] for count in sorted(found))]
    return [(name, after - before) for name, before, after in zip(names, medians, medians[1:])]


def measure(B, K, V, dtype, on, gpu, names, temperature, iterations):
    """Gate and time the named providers on one shape."""
    options = {"temperature": temperature}
    size = B * (2 * K + 1) * V * dtype.itemsize  # bytes that a call must read
    batches = [random_batch(B, K, V, dtype, on, temperature, seed) for seed in range(max(1, 8 // B))]  # 8 sequences at least
    expected = [by_eager(batch, temperature) for batch in batches]
    copies = 3 * getattr(gpu, "L2_cache_size", 0) // (size * len(batches)) + 1
    sets = [[x.clone() for x in batch] for _ in range(copies) for batch in batches]

    providers = {name: functools.partial(PROVIDERS[name], **options) for name in names}
    calls, found = gated(providers, sets, expected, functools.partial(gate, **options), {"ours"})
    floors = {block: [stream(*batch[1:3], block) for batch in sets] for block in (TILES if on != "cpu" and triton else ())}
    module = torch.get_device_module(on)
    found = timed(calls, found, {}, floors, module, iterations)
    shape = {"batch": B, "drafts": K, "vocabulary": V, "dtype": str(dtype).split(".")[1], "bytes": size}
    kernels = parts(calls["ours"], module, iterations) if "ours" in calls and on != "cpu" and triton else []
    return {**shape, **options, "providers": found, "kernels_us": kernels}


def ratios(report):
    """Ours beside the floor and the limit drawn from it, and others beside ours: a line for each shape."""
    for shape in report["shapes"]:
        medians = medians_of(shape, kinds_of(report)[0])
        mine, floor = medians.pop("ours", None), medians.pop("stream", None)
        cells = ["{batch}, {drafts}, {vocabulary:,}, {dtype}, temperature {temperature}".format(**shape)]
        if mine and floor:
            cells += [f"ours / stream {mine / floor:.2f}", f"limit 1.6 stream + 6 = {1.6 * floor + 6:.1f} µs, ours {mine:.1f}"]
        yield "; ".join([*cells, *(f"{name} / ours {x / mine:.2f}" for name, x in medians.items() if mine)])
        if shape["kernels_us"]:
            yield "  what each kernel adds: " + ", ".join(f"{name} {x:.1f}" for name, x in shape["kernels_us"])


def main():
    found = next((x for x in ("cuda", "xpu") if torch.get_device_module(x).is_available()), "cpu")
    parser = argparse.ArgumentParser(description="Time verify_logits beside what verifies from logits otherwise.")
    parser.add_argument("--device", default=found, choices=["cpu", "cuda", "xpu"])
    parser.add_argument("--shapes", default="8,5,128256 64,5,128256", metavar='"B,K,V ..."')
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=list(PROVIDERS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    on = options.device
    gpu = None if on == "cpu" else torch.get_device_module(on).get_device_properties()
    report = {**machine(on, gpu), "shapes": []}
    for dtype, shape in itertools.product(options.dtype, options.shapes.split()):
        shape = (*map(int, shape.split(",")), getattr(torch, dtype))
        report["shapes"] += [measure(*shape, on, gpu, options.providers, options.temperature, options.iterations)]
        print(shape, "equals the rule, timed", file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(tables(report, "softmax+verify"), "", *ratios(report), sep="\n")


if __name__ == "__main__":
    main()
