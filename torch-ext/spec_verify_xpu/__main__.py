"""What to paste into a bug report: versions, devices, and a self-check of every implementation against the rule.

python -m spec_verify_xpu; the exit status is 1 if any result differs from the rule.
"""

import importlib.util
import platform
import sys

import torch

from . import __version__, rule, verify
from .ops import implementation

IMPLEMENTATION_OF = {"launch": "triton", "compiled_cpu": "numba", "eager": "eager"}  # by the module that runs it


def devices():
    """The CPU, and every GPU that torch can use."""
    found = [torch.device("cpu")]
    for kind in ("cuda", "xpu"):
        module = torch.get_device_module(kind)
        if module.is_available():
            found += [torch.device(kind, i) for i in range(module.device_count())]
    return found


def self_check(device, impl):
    """How many sequences this implementation verified on this device, and how many of them differ from the rule."""
    g = torch.Generator().manual_seed(0)
    total = wrong = 0
    for B, K, V in ((32, 4, 100), (16, 5, 513), (4, 3, 4096)):
        draft_probs = torch.softmax(2 * torch.randn(B, K, V, generator=g), -1)
        target_probs = torch.softmax(2 * torch.randn(B, K + 1, V, generator=g), -1)
        target_probs[:, :K] = 0.8 * draft_probs + 0.2 * target_probs[:, :K]
        draft_tokens = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=g).view(B, K)
        uniforms = [torch.randint(2**63 - 1, (B, k), generator=g) for k in (K, K + 1)]
        inputs = (draft_tokens, draft_probs, target_probs, *uniforms)
        expected = torch.tensor(rule.verify(*inputs))
        result = torch.stack(verify(*(x.to(device) for x in inputs), impl=impl)).cpu()
        total += B
        wrong += int((result != expected).any(0).sum())
    return total, wrong


def describe(device):
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return torch.get_device_module(device).get_device_name(device)


def main():
    triton = "not installed"
    if importlib.util.find_spec("triton"):
        import triton as module

        triton = module.__version__
    print(f"spec-verify-xpu {__version__}, Python {platform.python_version()} on {platform.platform()}")
    backends = f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, XPU {torch.version.xpu}"
    print(f"torch {torch.__version__} ({backends}), Triton {triton}")
    failures = 0
    for device in devices():
        auto = IMPLEMENTATION_OF[implementation(device.type, "auto").__name__.rsplit(".", 1)[-1]]
        print(f"\n{device}: {describe(device)}; impl='auto' takes {auto}")
        for impl in IMPLEMENTATION_OF.values():
            try:
                total, wrong = self_check(device, impl)
            except ValueError as error:
                print(f"  {impl:7} not here: {error}")
                continue
            failures += wrong
            print(f"  {impl:7} {total - wrong} of {total} sequences equal the rule")
    print(f"\n{'MISMATCH: please report this' if failures else 'all equal to the rule, bit for bit'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
