"""Random ragged batches against rule.py; or a pool of them for a time from many threads, with an eye on the memory.

python tests/fuzz.py --impl numba --batches 10000
python tests/fuzz.py --impl numba --threads 8 --seconds 300
"""

import argparse
import contextlib
import gc
import itertools
import os
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from batches import any_ragged

MIB = 2**20
WARM_UP = 0.1  # of a soak's time, after which memory is to stay as it is
POOL = 200  # batches of a soak, whose results the rule gives once


def is_right(batch, expected, impl):
    results = batch.verify(impl)
    return all(got.dtype == want.dtype and torch.equal(got, want) for got, want in zip(results, expected))


def with_answers(seed, device):
    batch = any_ragged(seed)
    return batch.to(device), [x.to(device) for x in batch.by_rule()]


def check(seeds, impl, device):
    """Verify the batch of each seed. Returns how many sequences those were, and the seeds whose results are not the rule's."""
    sequences, wrong = 0, []
    for seed in seeds:
        batch, expected = with_answers(seed, device)
        sequences += batch.size
        try:
            if not is_right(batch, expected, impl):
                wrong.append(seed)
        except Exception as error:
            raise RuntimeError(f"the batch of seed {seed}") from error
    return sequences, wrong


def soak(seeds, impl, device, threads, seconds):
    """Verify a pool of batches once, then over and over from several threads, on a GPU each on a stream of its own.

    Returns how many batches and sequences were verified, the seeds whose results were not the rule's, and the memory
    {name: (after a warm-up, at the end, how much more would be a leak)}.
    """
    pool = [(seed, *with_answers(seed, device)) for seed in seeds]
    module = None if device.type == "cpu" else torch.get_device_module(device)
    streams = [module.Stream() if module else None for _ in range(threads)]  # made once: the memory kept for each is its own
    batches, sequences = [0] * threads, [0] * threads
    wrong = {seed for seed, batch, expected in pool if not is_right(batch, expected, impl)}  # what has to be compiled now is
    if module:
        module.synchronize()

    def work(i, end):
        with module.stream(streams[i]) if module else contextlib.nullcontext():
            for seed, batch, expected in itertools.islice(itertools.cycle(pool), i * len(pool) // threads, None):
                if not is_right(batch, expected, impl):
                    wrong.add(seed)
                batches[i] += 1
                sequences[i] += batch.size
                if time.monotonic() >= end:
                    return

    with ThreadPoolExecutor(threads) as executor:

        def work_for(share):
            end = time.monotonic() + share * seconds
            for done in [executor.submit(work, i, end) for i in range(threads)]:
                done.result()
            gc.collect()
            return memory(device)

        before, after = work_for(WARM_UP), work_for(1 - WARM_UP)
    return sum(batches), sum(sequences), sorted(wrong), {n: (before[n], after[n], leak(n, threads)) for n in before}


def memory(device):
    """What is in use, in bytes."""
    with open("/proc/self/statm") as statm:
        used = {"resident": int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        used.update(allocated=module.memory_allocated(), reserved=module.memory_reserved())
    return used


def leak(name, threads):
    """How many bytes more are too many.

    Every tensor is let go of, so nothing more may be allocated. torch reserves segments of 2 MiB for tensors as small as
    these, and threads that meet otherwise may need one more each. A process's pages vary by a few MiB; a single lost
    tensor or list (100 bytes and more) a call would make 20 MiB in 200,000 calls, which is a soak of minutes.
    """
    return {"resident": 16 * MIB, "allocated": 0, "reserved": 2 * MIB * threads}[name]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="the first batch's")
    parser.add_argument("--step", type=int, default=1, help="from one batch's seed to the next, to share work among processes")
    parser.add_argument("--batches", type=int, help=f"1000, or a pool of {POOL} with --seconds")
    parser.add_argument("--threads", type=int, default=1, help="with --seconds")
    parser.add_argument("--seconds", type=float, default=0, help="repeat for as long, and watch the memory")
    options = parser.parse_args()
    device = torch.device(options.device)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    warnings.simplefilter("ignore")  # numpy's of overflow under the interpreter, torch's of operations in no fixed order
    torch.set_num_threads(1)  # the tensors are small

    count = options.batches or (POOL if options.seconds else 1000)
    seeds = range(options.seed, options.seed + count * options.step, options.step)
    used = {}
    if options.seconds:
        batches, sequences, wrong, used = soak(seeds, options.impl, device, options.threads, options.seconds)
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory, so an output that nobody wrote shows
        batches, (sequences, wrong) = len(seeds), check(seeds, options.impl, device)
    threads = f", {options.threads} threads, {options.seconds:g} s" if options.seconds else ""
    print(f"{options.impl} on {device}{threads}: {batches} batches, {sequences} sequences, {len(wrong)} mismatches")
    for seed in wrong:
        print(f"mismatch: seed {seed}")
    for name, (before, after, bound) in used.items():
        print(
            f"{name} memory: {before / MIB:.1f} MiB warm, {after / MIB:.1f} MiB at the end, {bound / MIB:.0f} MiB more allowed"
        )
    leaks = any(after - before > bound for before, after, bound in used.values())
    sys.exit(1 if wrong or leaks else 0)


if __name__ == "__main__":
    main()
