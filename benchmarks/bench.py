"""Time `verify` beside what people use instead, on the same inputs in one process, behind a gate of correctness.

    python benchmarks/bench.py                                   # the README's table, on this machine's GPU or else its CPU
    python benchmarks/bench.py --suite full --json results.json  # many shapes; the file is written anew after each
    python benchmarks/bench.py --render results.json ...         # the tables, and pictures beside each file

Before a shape is timed, each of our implementations must equal rule.py on all of its inputs, or the script exits with 1.
Peers draw otherwise, by design: those that take our uniforms must accept what the rule accepts, and what any of them draws
must have mass in its row. One that fails, or cannot run here, is listed as "not run" with the reason.

A CPU is timed by the wall, twice: ten calls behind ten others (warm), and one among those of others (wall). A GPU is timed
thrice: its own time, from replays of a graph of calls on copies of the inputs that exceed its cache; the host's time for a
call, the queue never full, and beside it that of one kernel of ours as Triton launches it; and the wall's, for a call and a
synchronisation. Rounds visit the providers in random order, so that a drift meets all. `stream` reads as many bytes as the rule
must and does nothing else, on a CPU by torch's sum of each row: the floor that memory sets. Importing vLLM patches torch's
compiler: where it is installed, time the compiled route without it (--providers).
"""

import argparse
import functools
import inspect
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

import spec_verify_xpu as sv
from spec_verify_xpu.ops import IMPLEMENTATIONS, implementation

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU brings none, and the CPU needs none
    triton = None

WARMUPS = 5
README = [(8, 5, 32_000)]
VOCABULARIES = (32_000, 128_256, 151_936, 262_144)  # of Llama 2, Llama 3, Qwen and Gemma
FULL = [(B, 5, V) for B in (1, 8, 64, 256) for V in VOCABULARIES]
FULL += [(B, K, 128_256) for B in (1, 8, 64, 256) for K in (1, 16)]  # one vocabulary: a call reads the same rows for any K
PACKAGES = ("torch", "triton", "triton-xpu", "pytorch-triton-xpu", "numba", "transformers", "flashinfer-python", "vllm")


def random_batch(B, K, V, dtype, device, seed):
    """verify's arguments: drafts from softmax rows that the target shares in part, so that accepted varies from 0 to K."""
    g = torch.Generator(device).manual_seed(seed)
    draft_probs = torch.softmax(2 * torch.randn(B, K, V, device=device, generator=g), -1)
    target_probs = torch.softmax(2 * torch.randn(B, K + 1, V, device=device, generator=g), -1)
    target_probs[:, :K] = 0.7 * draft_probs + 0.3 * target_probs[:, :K]
    draft_tokens = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=g).view(B, K)
    uniforms = (torch.rand(B, n, device=device, generator=g) for n in (K, K + 1))
    return draft_tokens, draft_probs.to(dtype), target_probs.to(dtype), *uniforms


# A provider takes verify's arguments, prepares what is prepared once, and returns the call to time. That returns accepted [B]
# and next_token [B]; or tokens [B, K + 1], -1 after the last, or with how many of them count [B]; or a list with a row
# [1, accepted + 1] for each sequence.


def ours(*batch, impl):
    implementation(batch[0].device.type, impl)  # raises ValueError where it cannot run
    return lambda: sv.verify(*batch, impl=impl)


def out(*batch):
    """With outputs that are brought, as an engine that captures graphs has them."""
    tensors = tuple(torch.empty(len(batch[0]), dtype=torch.int64, device=batch[0].device) for _ in range(2))
    return lambda: sv.verify(*batch, out=tensors)


def ragged(*batch):
    """The same sequences one behind the other, by verify_varlen, which writes the tokens to emit too."""
    B, K = batch[0].shape
    ends = torch.arange(B + 1, device=batch[0].device) * K
    tokens, draft, target, *uniforms = (x.flatten(0, 1) for x in batch)
    emitted = torch.empty(B, K + 1, dtype=torch.int32, device=tokens.device)
    return lambda: sv.verify_varlen(tokens, draft, target, ends, K, *uniforms, emitted=emitted)


def route(draft_tokens, draft_probs, target_probs, uniform_accept, _):
    """What people write: the ratio test, a renormalised residual, and torch.multinomial with its own randomness."""
    at = draft_tokens[..., None]
    q, p = draft_probs.gather(-1, at)[..., 0], target_probs[:, :-1].gather(-1, at)[..., 0]
    accepted = (uniform_accept < (p / q).clamp(max=1)).long().cumprod(-1).sum(-1)
    rows = torch.arange(len(accepted), device=accepted.device)
    draft = torch.cat([draft_probs, torch.zeros_like(draft_probs[:, :1])], 1)  # [B, K + 1, V]
    residual = (target_probs[rows, accepted] - draft[rows, accepted]).clamp(min=0)
    return accepted, torch.multinomial(residual / residual.sum(-1, keepdim=True), 1)[:, 0]


def eager_route(*batch):
    return lambda: route(*batch)


def compiled_route(*batch):
    call = torch.compile(route, dynamic=False)
    return lambda: call(*batch)


def transformers(draft_tokens, draft_probs, target_probs, *_):
    """transformers' _speculative_sampling. It takes one sequence, so a loop; and logits, so log-probabilities, made before."""
    from transformers.generation.utils import _speculative_sampling as verify

    K, draft, target = draft_tokens.shape[1], draft_probs.log(), target_probs.log()
    flag = [False] if "is_done_candidate" in inspect.signature(verify).parameters else []  # 5.17 has it, 5.24 has not
    sequences = [slice(b, b + 1) for b in range(len(draft_tokens))]
    return lambda: [verify(draft_tokens[b], draft[b], K, target[b], *flag)[0] for b in sequences]


def flashinfer(draft_tokens, draft_probs, target_probs, *_):
    """FlashInfer's chain_speculative_sampling (0.7), deterministic as by default. The kernel draws the uniforms too."""
    from flashinfer.sampling import chain_speculative_sampling

    tokens = draft_tokens.int()
    counts = [torch.zeros_like(tokens[:, 0]) for _ in range(2)]
    seed, offset = (torch.zeros(1, dtype=torch.int64, device=tokens.device) for _ in range(2))  # tensors, for the graph's sake
    return lambda: chain_speculative_sampling(draft_probs, tokens, target_probs, *counts, seed=seed, offset=offset)[0]


def vllm(draft_tokens, draft_probs, target_probs, uniform_accept, _):
    """vLLM V1's two kernels (0.33): recovered tokens for all positions, then acceptance.

    V1 makes the uniforms, the exponential noise, the bonus token and the target's softmax in further launches, not timed.
    """
    from vllm.v1.sample.rejection_sampler import _rejection_random_sample, _sample_recovered_tokens

    (B, K, V), on = draft_probs.shape, {"device": draft_probs.device}
    tokens, draft, target = (x.flatten(0, 1) for x in (draft_tokens.int(), draft_probs, target_probs[:, :K]))
    ends = torch.arange(K, B * K + 1, K, dtype=torch.int32, **on)
    uniforms, noise = uniform_accept.double().flatten(), torch.empty(B, V, **on).exponential_().reciprocal_()
    bonus, is_greedy = torch.multinomial(target_probs[:, K], 1), torch.zeros(B, dtype=torch.bool, **on)

    def call():
        recovered, output = torch.empty_like(tokens), torch.full((B, K + 1), -1, dtype=torch.int32, **on)
        _sample_recovered_tokens(recovered, ends, tokens, draft, target, noise, max_spec_len=K)
        _rejection_random_sample(output, ends, tokens, draft, target, bonus, recovered, uniforms, is_greedy, K, None)
        return output

    return call


OURS = {impl: functools.partial(ours, impl=impl) for impl in IMPLEMENTATIONS if impl not in ("auto", "reference")}
OURS.update({f.__name__: f for f in (out, ragged)})
PEERS = {f.__name__.replace("_", "-"): f for f in (eager_route, compiled_route, transformers, flashinfer, vllm)}
PROVIDERS = {**OURS, **PEERS}
DRAWS_UNIFORMS = {"transformers", "flashinfer"}
WAITS = {"transformers"}  # for the device, amid a call: no graph can hold it, and the host's time is the wall's

if triton:

    @triton.jit
    def stream_kernel(draft, target, sums, K, V, pairs, BLOCK: tl.constexpr):
        """grid (B, ceil(V / BLOCK)): the sum of a tile of a target row, and of a draft row in the first `pairs` sequences."""
        b = tl.program_id(0).to(tl.int64)
        v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(target + b * (K + 1) * V + v, mask=v < V, other=0.0).to(tl.float32)
        x += tl.load(draft + b * K * V + v, mask=v < tl.where(b < pairs, V, 0), other=0.0).to(tl.float32)
        tl.store(sums + b * tl.num_programs(1) + tl.program_id(1), tl.sum(x, 0))


def plain_launch(*batch):
    """The second of our two kernels, that of more arguments, as kernel[grid](...) launches it: for the host's time alone."""
    from spec_verify_xpu.gpu import launch

    call = sv.api.dense_call((*batch, *[None] * 9), False, 1.0, None, None, torch.int64, None, None, None, "triton")
    aligned = launch.is_aligned(call)
    words, _, launches = launch.plan(call, aligned, *launch.configure(call, aligned))
    scratch = torch.empty(words, dtype=torch.int64, device=batch[0].device)
    tensors = {**launch.as_read(call), "scratch": scratch, "bests": scratch}
    launches[0].run(tensors)  # what the second reads
    return lambda: launches[1].run(tensors)


def stream(draft_probs, target_probs, pairs, block):
    B, K, V = draft_probs.shape
    sums = torch.empty(B, triton.cdiv(V, block), device=draft_probs.device)
    return lambda: stream_kernel[sums.shape](draft_probs, target_probs, sums, K, V, pairs, block, num_warps=4)


def read(draft_probs, target_probs, accepted):
    """The floor of a CPU."""
    pairs = [(target_probs[b, n], draft_probs[b, n : n + 1]) for b, n in enumerate(accepted)]
    rows = [row for target, draft in pairs for row in (target, *draft)]
    return lambda: [row.sum() for row in rows]


def outcome(output):
    """accepted [B] and next_token [B] of what a provider's call returned."""
    if isinstance(output, list):
        output = pad_sequence([row[0] for row in output], batch_first=True, padding_value=-1)
    if isinstance(output, torch.Tensor):
        output = output, (output >= 0).sum(1)
    first, second = output
    if first.ndim == 1:
        return first, second
    accepted = second.long() - 1
    return accepted, first.gather(1, accepted[:, None])[:, 0].long()


def check_mass(draft_probs, target_probs, accepted, next_token):
    """Raise where a sequence cannot have got this token after so many drafts."""
    K, rows = draft_probs.shape[1], torch.arange(len(accepted), device=accepted.device)
    q = draft_probs[rows, accepted.clamp(max=K - 1), next_token] * (accepted < K)
    if not (target_probs[rows, accepted, next_token] > q).all():
        raise ValueError("next_token has no mass in its row")


def gate(name, batch, output, expected):
    """Exit where one of ours differs from the rule; raise where a peer's output cannot be right."""
    accepted, next_token = outcome(output)
    if name in OURS and not (torch.equal(accepted, expected.accepted) and torch.equal(next_token, expected.next_token)):
        sys.exit(f"{name} differs from the rule, so nothing is reported: {output}, by the rule {expected}")
    if name not in DRAWS_UNIFORMS and not torch.equal(accepted, expected.accepted):
        raise ValueError("accepted differs from the rule's")
    check_mass(*batch[1:3], accepted, next_token)


def clock(calls, module, count, wait, untimed=0):
    """A function that samples the wall's microseconds a call: of `count` from an idle device, until it is idle again or not."""
    turn = itertools.cycle(calls)

    def sample():
        for call in itertools.islice(turn, untimed):
            call()
        batch = list(itertools.islice(turn, count))
        module.synchronize()
        start = time.perf_counter()
        for call in batch:
            call()
        if wait:
            module.synchronize()
        return (time.perf_counter() - start) / count * 1e6

    return sample


def device_clock(calls, module):
    """Likewise the device's microseconds a call: of 64 or more, in a graph where this torch has graphs for the device."""
    calls = calls * max(1, 64 // len(calls))

    def run():
        for call in calls:
            call()

    run()
    module.synchronize()
    Graph = getattr(module, "CUDAGraph", None) or getattr(module, "XPUGraph", None)
    if Graph:
        graph = Graph()
        with module.graph(graph):
            run()

    def sample():
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay() if Graph else run()
        end.record()
        module.synchronize()
        return start.elapsed_time(end) / len(calls) * 1e3

    return sample


def interleaved(clocks, iterations):
    """Sample every clock, in rounds of random order: {name: quartiles}."""
    names, shuffle, samples = list(clocks), random.Random(0).shuffle, {name: [] for name in clocks}
    for _ in range(WARMUPS + iterations):
        shuffle(names)
        for name in names:
            samples[name].append(clocks[name]())
    quartiles = {name: statistics.quantiles(x[WARMUPS:], method="inclusive") for name, x in samples.items()}
    return {name: {"lower": q[0], "median": q[1], "upper": q[2], "n": iterations} for name, q in quartiles.items()}


def gated(providers, sets, expected, gate, ours):
    """The calls of the providers that pass the gate, and why others cannot run: {name: calls}, {name: {} or not_run}."""
    calls, found = {}, {name: {} for name in providers}
    for name, provider in providers.items():
        try:
            made = [provider(*batch) for batch in sets]
            for batch, call, wanted in zip(sets, made, itertools.cycle(expected)):
                gate(name, batch, call(), wanted)
            calls[name] = made
        except Exception as error:
            if name in ours and not isinstance(error, ValueError):
                raise
            found[name]["not_run"] = (str(error) or repr(error)).split("\n")[0]
    return calls, found


def timed(calls, found, plain, floors, module, iterations):
    """What is found, with quartiles of each kind of time. `plain` has a host time alone; the fastest of `floors` is stream."""
    times = {"wall_us": interleaved({name: clock(calls[name], module, 1, True) for name in calls}, iterations)}
    if module is torch.cpu:
        warm = {**calls, **floors}
        times["warm_us"] = interleaved({name: clock(warm[name], module, 10, False, 10) for name in warm}, iterations)
    else:
        free = {name: calls[name] for name in calls if name not in WAITS}
        host, device = {**free, **plain}, {**free, **floors}
        times["host_us"] = interleaved({name: clock(host[name], module, 20, False) for name in host}, iterations)
        times["device_us"] = interleaved({name: device_clock(device[name], module) for name in device}, iterations)
    if floors:
        kind = times["warm_us" if module is torch.cpu else "device_us"]
        kind["stream"] = min((kind.pop(floor) for floor in floors), key=lambda x: x["median"])
        found = {"stream": {}, **found}
    for kind, quartiles in times.items():
        for name in quartiles:
            found.setdefault(name, {})[kind] = quartiles[name]
    return found


def measure(B, K, V, dtype, on, gpu, names, iterations):
    """Gate and time the named providers on one shape."""
    module = torch.get_device_module(on)
    cache = getattr(gpu, "L2_cache_size", 0) or getattr(gpu, "last_level_cache_size", 0)  # a CPU's is left as it is
    at = torch.arange(B, device=on) % 64  # sequences repeat after 64, since the rule takes minutes for more
    seeds = range(max(1, 8 // B))  # 8 sequences at least, so that accepted varies
    batches = [[x[at] for x in random_batch(min(B, 64), K, V, dtype, on, seed)] for seed in seeds]
    by_rule = [sv.verify(*(x[:64] for x in batch), impl="reference") for batch in batches]
    expected = [sv.VerifyResult(*(x[at] for x in result)) for result in by_rule]
    pairs = [int((x.accepted < K).sum()) for x in expected]  # sequences of which a call must read the draft's row too
    size = int((B + statistics.mean(pairs)) * V * dtype.itemsize)  # bytes that a call must read
    sets = [[x.clone() for x in batch] for _ in range(3 * cache // (size * len(batches)) + 1) for batch in batches]

    torch.compiler.reset()  # a function is compiled for eight shapes at most
    calls, found = gated({name: PROVIDERS[name] for name in names}, sets, expected, gate, OURS)
    plain, floors = {}, {}
    if on != "cpu" and "triton" in calls:
        plain["plain-launch"] = [plain_launch(*batch) for batch in sets]
    if on == "cpu":
        floors["read"] = [read(*batch[1:3], x.accepted.tolist()) for batch, x in zip(sets, itertools.cycle(expected))]
    for block in (1024, 2048) if on != "cpu" and triton else ():  # the floor is the faster of two tiles
        floors[block] = [stream(*batch[1:3], n, block) for batch, n in zip(sets, itertools.cycle(pairs))]
    found = timed(calls, found, plain, floors, module, iterations)
    return {"batch": B, "drafts": K, "vocabulary": V, "dtype": str(dtype).split(".")[1], "bytes": size, "providers": found}


def machine(on, gpu):
    """Where and with what the times are taken."""

    def shell(command):
        return subprocess.run(command, shell=True, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()

    versions = {x.metadata["Name"]: x.version for x in metadata.distributions()}
    driver = getattr(gpu, "driver_version", "") or shell("nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0")
    return {
        "device": on,
        "name": gpu.name if gpu else shell("sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1") or platform.processor(),
        "driver": driver if gpu else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: versions[name] for name in PACKAGES if name in versions},
        "commit": shell("git rev-parse --short HEAD") + "-dirty" * bool(shell("git status --porcelain -uno -- :/ ':!results'")),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def kinds_of(report):
    """The times that were taken, the one that counts first."""
    return ["warm_us", "wall_us"] if report["device"] == "cpu" else ["device_us", "host_us", "wall_us"]


def medians_of(shape, kind):
    return {name: times[kind]["median"] for name, times in shape["providers"].items() if kind in times}


def tables(report, route="eager-route"):
    """The report in Markdown: where it was taken, and a table for each shape; `route` is set beside each provider."""
    kinds = kinds_of(report)
    titles = ["", *(f"{kind[:-3]}, µs (quartiles)" for kind in kinds), f"{route.replace('-', ' ')} / this"]
    titles += ["stream / this", "GB/s"]
    driver = [f"driver {report['driver']}"] if report["driver"] else []
    lines = [", ".join([report["name"], *driver, f"{report['cores']} cores", f"Python {report['python']}"])]
    lines += [", ".join([*map(" ".join, report["packages"].items()), f"commit {report['commit']}", report["date"]])]

    def number(x):
        return f"{x:,.{2 if x < 10 else 1 if x < 100 else 0}f}"

    for shape in report["shapes"]:
        lines += ["", "Batch {batch}, {drafts} drafts, vocabulary {vocabulary:,}, {dtype}:".format(**shape)]
        lines += ["", f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
        medians = medians_of(shape, kinds[0])
        for name, times in shape["providers"].items():
            cells = [name]
            for kind in kinds:
                spread = [number(times[kind][x]) for x in ("median", "lower", "upper")] if kind in times else []
                cells += ["{} ({} to {})".format(*spread) if spread else ""]
            if "not_run" in times:
                cells[1] = f"not run: {times['not_run']}"
            for other in (route, "stream"):
                cells += [number(medians[other] / medians[name]) if {other, name} <= medians.keys() else ""]
            cells += [number(shape["bytes"] / medians[name] / 1e3) if name in medians else ""]
            lines += [f"| {' | '.join(cells)} |"]
    return "\n".join(lines)


def pictures(report, path):
    """Time against vocabulary for each provider; and how near the fastest of ours comes to the memory floor, shape by shape."""
    from matplotlib.figure import Figure

    kind, shapes = kinds_of(report)[0], report["shapes"]
    K = statistics.mode(shape["drafts"] for shape in shapes)
    batches = sorted({shape["batch"] for shape in shapes if shape["drafts"] == K})
    vocabulary = Figure(figsize=(3 + 2.5 * len(batches), 4), dpi=150, layout="constrained")
    for axes, B in zip(vocabulary.subplots(1, len(batches), sharey=True, squeeze=False)[0], batches):
        medians = {x["vocabulary"]: medians_of(x, kind) for x in shapes if (x["batch"], x["drafts"]) == (B, K)}
        for name in dict.fromkeys(name for shape in shapes for name in medians_of(shape, kind)):
            style = "kx--" if name == "stream" else "o-"
            axes.plot(list(medians), [x.get(name) for x in medians.values()], style, label=name)
        axes.set(yscale="log", xlabel="vocabulary", title=f"batch {B}, {K} drafts")
        axes.set_xticks(list(medians), [f"{V:,}" for V in medians], rotation=45, ha="right")
    vocabulary.axes[0].set_ylabel(f"{kind[:-3]} time of a call, µs")
    vocabulary.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)

    shares = {}
    for shape in shapes:
        medians = medians_of(shape, kind)
        if "stream" in medians:
            share = medians["stream"] / min(medians[name] for name in OURS if name in medians)
            shares["{batch}, {drafts}, {vocabulary:,}".format(**shape)] = 100 * share
    floor = Figure(figsize=(7, 1.2 + 0.25 * len(shares)), dpi=150, layout="constrained")
    axes = floor.subplots()
    axes.bar_label(axes.barh(list(shares), list(shares.values()), color="#9ecae1"), fmt="%.0f", label_type="center")
    axes.axvline(100, color="#d94801")
    axes.invert_yaxis()
    axes.set(xlabel="share of the memory floor: stream's time / ours, %", ylabel="batch, drafts, vocabulary")

    for suffix, figure in (("vocabulary", vocabulary), ("floor", floor)) if shares else (("vocabulary", vocabulary),):
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(report["name"])
        figure.savefig(path.with_suffix(f".{suffix}.png"))


def main():
    found = next((x for x in ("cuda", "xpu") if torch.get_device_module(x).is_available()), "cpu")
    parser = argparse.ArgumentParser(description="Time verify beside what people use instead.")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "xpu"])
    parser.add_argument("--suite", default="readme", choices=["readme", "full"])
    parser.add_argument("--shapes", metavar='"B,K,V ..."')
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=list(PROVIDERS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--render", type=Path, nargs="+", metavar="PATH")
    options = parser.parse_args()
    for path in options.render or ():
        report = json.loads(path.read_text())
        print(tables(report))
        pictures(report, path)
    if options.render:
        return

    on = found if options.device == "auto" else options.device
    gpu = None if on == "cpu" else torch.get_device_module(on).get_device_properties()

    def fits(B, K, V):
        """The full suite ends at batch 8 on a CPU, where a peer takes seconds for more, and at an eighth of a GPU's memory."""
        return 4 * B * (2 * K + 1) * V <= gpu.total_memory / 8 if gpu else B <= 8

    shapes = {"readme": README, "full": [shape for shape in FULL if fits(*shape)]}[options.suite]
    if options.shapes:
        shapes = [tuple(map(int, shape.split(","))) for shape in options.shapes.split()]
    report = {**machine(on, gpu), "shapes": []}
    for shape in shapes:
        report["shapes"] += [measure(*shape, getattr(torch, options.dtype), on, gpu, options.providers, options.iterations)]
        print(shape, "equals the rule, timed", file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(tables(report))


if __name__ == "__main__":
    main()
