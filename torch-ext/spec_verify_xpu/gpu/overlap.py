"""Hopper's overlapped launches: a kernel starts when the one before it releases it, and waits before it reads what that wrote.

The first of a call waits before all else, and only then releases the next. So whatever ran before the call has ended, and later
kernels may read the call's inputs before they wait, and scratch after. A module of its own, which other backends never import:
some fail on the mere names.
"""

import triton
import triton.language as tl


@triton.jit
def release():
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait():
    tl.extra.cuda.gdc_wait()
