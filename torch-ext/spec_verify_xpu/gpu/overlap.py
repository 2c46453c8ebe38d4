"""Hopper's overlapped launches: the second kernel starts while the first runs, and waits before it reads what that wrote.

The first kernel waits before all else, and releases the second later, so whatever ran before it has ended, and the second
touches scratch only after its own wait. A module of its own, which other backends never import: some fail on the mere names.
"""

import triton
import triton.language as tl


@triton.jit
def release():
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait():
    tl.extra.cuda.gdc_wait()
