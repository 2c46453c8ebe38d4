"""What Intel's offline compiler makes of the kernels, for GPUs that are not here: python tests/intel/static.py [--record].

Prints a table; --record writes what is in it to docs/intel_static.json. The compiler is `ocloc` on the path, or $OCLOC.
"""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import torch
from triton._C.libtriton import intel

import runtime
import spec_verify_xpu as sv
from batches import as_logits, random_batch
from compile_only import KERNELS, CompileOnly, serve, serve_logits
from spec_verify_xpu.gpu import config, launch
from spec_verify_xpu.rule import BLOCK

OCLOC = os.environ.get("OCLOC", "ocloc")
RECORD = Path(__file__).parents[2] / "docs/intel_static.json"
GPUS = ("tgllp", "dg2", "mtl", "pvc", "bmg", "lnl")  # Iris Xe, Arc A, Meteor Lake, Data Center Max, Arc B, Lunar Lake
SETTINGS = (config.XPU, config.XPU_FEW_ROWS)
SUB_GROUPS = (16, 32)
VOCABULARIES = (32000, 32001)  # aligned rows and not
DRAFTS = ("probs", "one_hot")
DTYPES = (torch.float32, torch.bfloat16)
LOGITS_KERNELS = ("weigh_blocks", "share_rows", "sum_residual", "draw")


def ocloc(*arguments, spirv=b""):
    """Run ocloc in a directory of its own, beside kernel.spv: (what it printed, {name: text} of what it wrote, in order)."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "kernel.spv").write_bytes(spirv)
        environment = {**os.environ, "IGC_ShaderDumpEnable": "1", "IGC_DumpToCustomDir": name}
        result = subprocess.run([OCLOC, *arguments], cwd=name, env=environment, capture_output=True, text=True)
        written = [*directory.glob("*.asm"), *directory.glob("OCL_DRIVER_VERSION")]
        written.sort(key=lambda path: path.stat().st_mtime_ns)
        return result.stdout + result.stderr, {path.name: path.read_text() for path in written}


@functools.lru_cache(None)
def version():
    return ocloc("query", "OCL_DRIVER_VERSION")[1]["OCL_DRIVER_VERSION"].strip(" \0")


@functools.lru_cache(None)
def known_gpus():
    names = ocloc("compile", "--help")[0]
    return [gpu for gpu in GPUS if re.search(rf"\b{gpu}\b", names)]


def compile_for(run, setting, sub_group):
    """The kernels that run() launches in one configuration, compiled."""
    runtime.install(sub_group)
    compiled = []
    stand_ins = {name: CompileOnly(getattr(launch, name), compiled) for name in KERNELS}
    facts = launch.DeviceFacts(threads=2**31, exact=launch.EXACT)  # rows go at once: stages launch the same kernels again
    stand_ins.update(CONFIGURATIONS={"cpu": lambda *_: setting}, device_facts=lambda _: facts)
    logits = {"cpu": config.LOGITS["xpu"]}
    with mock.patch.multiple(launch, **stand_ins), mock.patch.dict(config.LOGITS, logits):
        run()
    return compiled


def launched_kernels(setting, sub_group, V, draft, dtype):
    """The kernels of `verify` for 8 sequences of 5 drafts."""
    batch = random_batch(8, 5, V, dtype=dtype, one_hot=draft == "one_hot")
    return compile_for(lambda: batch.verify("triton"), setting, sub_group)


def serving_kernels():
    """Those of ragged and greedy sequences, of seeds, emitted tokens, and scores of every dtype, as an XPU gets them."""
    batch = random_batch(2, 3, 32001)
    return [kernel for setting in SETTINGS for kernel in compile_for(lambda: serve(batch), setting, sub_group=16)]


def logits_kernels(V, draft, dtype):
    """Those of `verify_logits` for 8 sequences of 5 drafts with temperatures."""
    tokens, q, p, *uniforms = random_batch(8, 5, V, dtype=dtype, one_hot=draft == "one_hot")[:5]
    options = {"temperature": torch.ones(8), "impl": "triton"}
    return compile_for(lambda: sv.verify_logits(tokens, as_logits(q), as_logits(p), *uniforms, **options), None, sub_group=16)


def logits_serving_kernels():
    """Those of ragged and greedy sequences, of seeds, emitted tokens, and rows of every dtype."""
    batch = random_batch(2, 3, 32001)
    return compile_for(lambda: serve_logits(batch), None, sub_group=16)


def measure(kernel, gpu):
    """What is in the assembly that IGC makes for a GPU from the SPIR-V of Intel's backend.

    IGC compiles again, unrolling less, where the first code spills: `tries`. The last one counts. `fma` is how many fused
    products and sums the LLVM IR asks for, `fused` how many there are.
    """
    spirv = intel.translate_to_spirv(kernel.asm["llir"])[0]
    output, written = ocloc("compile", "-file", "kernel.spv", "-spirv_input", "-device", gpu, spirv=spirv)
    assert written, output
    name, assembly = list(written.items())[-1]

    def number(pattern, text=assembly):
        return int((re.findall(pattern, text) or ["0"])[0])

    code = re.sub(r"(?m)^//.*", "", assembly)
    return {
        "instructions": number(r"//\.instCount (\d+)"),
        "spill": number(r"//\.spill size (\d+)"),
        "tries": len(written),
        "simd": number(r"_simd(\d+)_", name),
        "grf": number(r"numGRF=(\d+)"),
        "fp64": len(re.findall(r":df\b", code)),
        "atomics": len(re.findall(r"\batomic", code)),
        "fma": len(re.findall(r"call float @llvm\.fma\.", kernel.asm["llir"])),
        "fused": len(re.findall(r"\bmad\b.*:f\b", code)),
        "loop": longest_loop(code),
    }


def longest_loop(code):
    """Instructions of the longest loop, from the label that a later line jumps back to."""
    starts, count, longest = {}, 0, 0
    for line in code.splitlines():
        if label := re.match(r"(\w+):", line):
            starts[label[1]] = count
        elif re.match(r"\s*(\(\S+\)\s+)?[a-z]\w*(\.\w+)* ", line):
            count += 1
            if jump := re.search(r"\b(?:while|jmpi)\b(?: +\(\S+\))? +(\w+)", line):
                longest = max(longest, count - starts.get(jump[1], count))
    return longest


def measurements():
    """One row for each kernel, GPU and way to launch it on an XPU."""
    compiled = [
        ({"V": V, "draft": draft, "dtype": str(dtype).split(".")[1], "chunk": setting.chunk, "chunks": setting.chunks}, kernel)
        for setting, sub_group, V, draft, dtype in itertools.product(SETTINGS, SUB_GROUPS, VOCABULARIES, DRAFTS, DTYPES)
        for kernel in launched_kernels(setting, sub_group, V, draft, dtype)
    ]
    compiled += [
        ({"V": V, "draft": draft, "dtype": str(dtype).split(".")[1], "chunk": BLOCK, "chunks": 1}, kernel)
        for V, draft, dtype in itertools.product(VOCABULARIES, DRAFTS, DTYPES)
        for kernel in logits_kernels(V, draft, dtype)
    ]

    def row(job):
        gpu, (launched, kernel) = job
        threads = {"sub_group": kernel.metadata.threads_per_warp, "warps": kernel.metadata.num_warps}
        return {"ocloc": version(), "gpu": gpu, "kernel": kernel.name, **launched, **threads, **measure(kernel, gpu)}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(row, itertools.product(known_gpus(), compiled)))


def case(row):
    """What a row is a measurement of."""
    names = ("ocloc", "gpu", "kernel", "V", "draft", "dtype", "chunk", "chunks", "sub_group", "warps")
    return tuple(row[name] for name in names)


def is_plain(row):
    return row["draft"] == "probs" and row["dtype"] == "float32"


def table(rows):
    """Instructions for float32 rows with draft probabilities; those of sum_chunks also as instructions * warps / entries.

    Of the kernels of logits the same of their longest loop: of the first and the third that is what a block takes.
    """
    lines = [f"ocloc {version()}", "GPU   threads  chunks     sum_chunks 32000, 32001         locate 32000, 32001"]
    of_logits = [row for row in filter(is_plain, rows) if row["kernel"] in LOGITS_KERNELS]
    rows = [row for row in filter(is_plain, rows) if row["kernel"] in ("sum_chunks", "locate")]
    rows = sorted(rows, key=lambda row: (GPUS.index(row["gpu"]), row["sub_group"], -row["chunk"]))
    for (gpu, threads, chunk), group in itertools.groupby(rows, lambda row: (row["gpu"], row["sub_group"], row["chunk"])):
        group = list(group)
        sums, searches = ([row for row in group if row["kernel"] == name] for name in ("sum_chunks", "locate"))
        line = f"{gpu:6}{threads:7}  {chunk:3} x {sums[0]['chunks']}  "
        for row in sums:
            rate = row["instructions"] * row["warps"] / (row["chunk"] * row["chunks"])
            line += f"{row['instructions']:7} ({f'{rate:.2f}' if row['tries'] == 1 else 'loop'})"
        line += "".join(f"{row['instructions']:12}" for row in searches)
        spills = [row["spill"] for row in group]
        lines.append(line + f"  spilled bytes: {spills}" * any(spills))
    lines.append("GPU     " + "".join(f"{name + ' 32000, 32001':30}" for name in LOGITS_KERNELS))
    for gpu in dict.fromkeys(row["gpu"] for row in of_logits):
        line = f"{gpu:6}"
        for name in LOGITS_KERNELS:
            group = [row for row in of_logits if (row["gpu"], row["kernel"]) == (gpu, name)]
            cells = (f"{row['instructions']} ({row['loop'] * row['warps'] / BLOCK:.2f})" for row in group)
            line += f"  {', '.join(cells):28}"
            line += f"  spilled bytes: {[row['spill'] for row in group]}" * any(row["spill"] for row in group)
        lines.append(line)
    return "\n".join(lines)


def recorded():
    return json.loads(RECORD.read_text()) if RECORD.exists() else []


def record(rows):
    """Write the rows of the table in the place of those of the same ocloc."""
    rows = [row for row in recorded() if row["ocloc"] != version()] + list(filter(is_plain, rows))
    RECORD.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    rows = measurements()
    print(table(rows))
    if "--record" in sys.argv:
        record(rows)
