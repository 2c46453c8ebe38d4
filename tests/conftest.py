"""Where the tests run. `--device cpu` runs the Triton kernels under Triton's interpreter, `cuda` and `xpu` on that GPU."""

import os

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda", "xpu"])


def pytest_configure(config):
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")  # Triton 3.9 warns where it is unset; every operation here is exact
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(params=["eager", "triton", "numba"])
def impl(request, device):
    if request.param == "numba":
        if device.type != "cpu":
            pytest.skip("Numba runs on the CPU")
        pytest.importorskip("numba")
    return request.param


@pytest.fixture
def sequences(impl):
    """How many sequences to verify where n would do: a fifth of n under Triton's interpreter, which takes 30 ms for each."""
    interpreted = impl == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return lambda n: n // 5 if interpreted else n


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch's deterministic mode fills what torch.empty gives out, so a word of output or scratch that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1, dtype=torch.int64).item() == 2**63 - 1
    yield
    torch.use_deterministic_algorithms(False)
