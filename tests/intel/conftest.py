"""Everything here runs the kernels through Intel's compiler: see runtime.py."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("pyopencl") is None:  # an environment with another Triton: see requirements.txt
    collect_ignore_glob = ["test_*.py"]
else:
    import runtime
    from spec_verify_xpu.gpu import config

    @pytest.hookimpl(trylast=True)  # after the tests' own conftest, which would interpret the kernels
    def pytest_configure():
        os.environ["TRITON_INTERPRET"] = "0"


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Nothing compiled outlives the session, mutated kernels least of all."""
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))


@pytest.fixture(autouse=True)
def intel(monkeypatch):
    """CPU tensors stand in for those of an XPU."""
    for configurations in (config.CONFIGURATIONS, config.LOGITS):
        monkeypatch.setitem(configurations, "cpu", configurations["xpu"])
    runtime.install()


@pytest.fixture
def impl():
    return "triton"
