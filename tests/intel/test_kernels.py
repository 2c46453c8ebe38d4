"""The tests of the kernels, on Intel's SPIR-V, in each configuration that an XPU can get."""

import pytest

from spec_verify_xpu.gpu import config
from test_parity import *  # noqa: F403
from test_properties import *  # noqa: F403


@pytest.fixture(autouse=True, params=["XPU", "XPU_FEW_ROWS"])
def configuration(request, monkeypatch):
    monkeypatch.setitem(config.CONFIGURATIONS, "cpu", lambda B, V, threads: getattr(config, request.param))
