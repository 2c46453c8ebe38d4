"""What only Intel's Triton backend takes. A module of its own, which other backends never import."""

from triton.backends.intel.compiler import XPUOptions

# Sub-groups of 16, not the backend's 32, which takes 1.4 to 1.9 times the instructions (docs/INTEL.md). The option was renamed
# in September 2025, so ask the backend that is installed.
OPTIONS = {"warp_size" if hasattr(XPUOptions, "warp_size") else "threads_per_warp": 16}
