"""The tests of the kernels, on Intel's SPIR-V, in each configuration that an XPU can get."""

import pytest

import fuzz
import runtime
from spec_verify_xpu.gpu import config
from test_parity import *  # noqa: F403
from test_properties import *  # noqa: F403

if runtime.SUB_GROUP == 16:  # which is what an XPU gets
    from test_serving import *  # noqa: F403

    def test_random_ragged_batches(impl, device):
        """A share of `python tests/intel/fuzz_intel.py --batches 10000`. Each of these has kernels of its own to compile."""
        assert not fuzz.check(range(25), impl, device)[1]


@pytest.fixture(autouse=True, params=["XPU", "XPU_FEW_ROWS"])
def configuration(request, monkeypatch):
    forced = getattr(config, request.param)
    monkeypatch.setitem(config.CONFIGURATIONS, "cpu", lambda B, V, *_: forced if V <= forced.most() else config.XPU)
