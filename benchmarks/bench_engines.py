"""The plugin for vLLM beside vLLM's own sampler, on the CPU: `make bench-engines`.

Both are called as the engine calls them, in one process, in rounds of random order. Wall time, median and quartiles. Before it
is timed, the plugin's result is compared with rule.py's.
"""

import argparse
import functools
import os
from types import SimpleNamespace
from unittest import mock

import bench
import torch

import spec_verify_xpu as sv
from spec_verify_engines import vllm as plugin

SHAPES = (1, 4, 49_152), (8, 4, 49_152), (32, 4, 49_152), (8, 4, 151_936)  # requests, drafts of each, vocabulary


def arguments(B, K, V, has_probs, mixed, seeded=False):
    """Of a step in which each request has K drafts, and with mixed every other one is greedy."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(B * K, V, generator=generator)
    draft_probs = (logits + torch.randn(B * K, V, generator=generator)).softmax(-1)
    ids = torch.multinomial(draft_probs, 1, generator=generator)[:, 0].int()
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=not mixed,
        temperature=(torch.arange(B) % 2 if mixed else torch.ones(B)).float(),
        generators={b: torch.Generator().manual_seed(b) for b in range(B if seeded else 0)},
    )
    ends = torch.arange(K, B * K + 1, K, dtype=torch.int32)
    return ids, [K] * B, K, ends, draft_probs if has_probs else None, logits, torch.zeros(B, 1, dtype=torch.int32), metadata


def check(*shape):
    """Raise if the plugin's tokens are not those of the reference from the same random bits."""
    verify = sv.verify_varlen
    with mock.patch.object(sv, "verify_varlen", lambda *x, impl, **options: verify(*x, impl="reference", **options)):
        expected = plugin.verify(*arguments(*shape, seeded=True))
    torch.testing.assert_close(plugin.verify(*arguments(*shape, seeded=True)), expected, rtol=0, atol=0)


@torch.inference_mode()  # as the engine runs them
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    os.environ["VLLM_PLUGINS"] = ""
    import vllm.v1.sample.rejection_sampler as sampler
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    providers = sampler.rejection_sample, plugin.in_place_of(sampler.rejection_sample)
    print("| requests, drafts, vocabulary | drafts | requests are | vLLM, us | plugin, us | vLLM / plugin |")
    print("| --- | --- | --- | --- | --- | --- |")
    for B, K, V in SHAPES:
        for has_probs in (True, False):
            for mixed in (False, True) if B > 1 else (False,):
                check(B, K, V, has_probs, mixed)
                inputs = arguments(B, K, V, has_probs, mixed)
                clocks = {f: bench.clock([functools.partial(f, *inputs)], torch.cpu, 1, False) for f in providers}
                stock, ours = bench.interleaved(clocks, options.rounds).values()
                cells = ["{median:,.0f} ({lower:,.0f} to {upper:,.0f})".format(**x) for x in (stock, ours)]
                kind = "with probabilities" if has_probs else "without", "half greedy" if mixed else "random"
                ratio = f"{stock['median'] / ours['median']:.2f}x"
                print("|", " | ".join([f"{B}, {K}, {V:,}", *kind, *cells, ratio]), "|", flush=True)


if __name__ == "__main__":
    main()
