"""The way from verify to an Intel GPU, walked without one: fake xpu tensors, a stand-in device, a stand-in launch."""

import ast
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spec_verify_xpu.gpu import launch, xpu
from spec_verify_xpu.ops import Call
from spec_verify_xpu.rule import SAMPLE

PACKAGE = Path(launch.__file__).parents[1]
XPU = torch.device("xpu", 1)


@pytest.fixture
def iris_xe(monkeypatch):
    """torch.xpu where the second GPU is an Iris Xe and the first is current. Gives the devices that were entered."""
    entered = []

    @contextlib.contextmanager
    def guard(device):
        entered.append(device)
        yield
        entered.append(None)

    module = SimpleNamespace(current_device=lambda: 0, device=guard)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(gpu_eu_count=96))
    launch.device_facts.cache_clear()
    yield entered
    launch.device_facts.cache_clear()


@pytest.mark.parametrize("B, chunk, programs", [(1, 128, 32), (64, 512, 8)], ids=["few_rows", "many_rows"])
def test_launches_on_the_tensors_device(iris_xe, monkeypatch, B, chunk, programs):
    """Both kernels, inside the guard of the tensors' GPU, by plain kernel[grid], in sub-groups of 16."""
    calls = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **options: calls.append((self.name, grid, iris_xe[-1], args, options))

    for name in ("sum_chunks", "locate"):
        monkeypatch.setattr(launch, name, Kernel(name))
    monkeypatch.setattr(launch, "is_aligned", lambda call: True)  # a fake tensor has no address
    with FakeTensorMode():
        draft, target = (torch.empty(B, k, 32000, device=XPU) for k in (5, 6))
        uniforms = [torch.empty(B, k, dtype=torch.int64, device=XPU) for k in (5, 6)]
        tokens = torch.empty(B, 5, dtype=torch.int64, device=XPU)
        results = (torch.empty(B, dtype=torch.int64, device=XPU) for _ in range(2))
        options = None, None, SAMPLE, None, None, 5, None, None, False, None, 1.0, *[None] * 4
        launch.verify(Call(tokens, draft, target, *uniforms, *options, *results))
    assert iris_xe == [XPU, None]
    assert [(name, grid, device) for name, grid, device, *_ in calls] == [
        ("sum_chunks", (B, programs, 1), XPU),
        ("locate", (B, 1, 1), XPU),
    ]
    for _, _, _, args, options in calls:
        assert options == {"num_warps": 8, **xpu.OPTIONS} and 16 in options.values()
        assert chunk in [x for x in args if isinstance(x, int)] and args[-1] is None  # no overlapped launches


def test_options_are_those_that_this_triton_knows():
    from triton.backends.intel.compiler import XPUOptions

    assert {*xpu.OPTIONS, *launch.EXACT} < set(XPUOptions.__dataclass_fields__)


def test_nothing_waits_for_a_device_or_makes_a_stream():
    """No module that a call passes through names a synchronisation, a stream of its own, or a read-back."""
    waits = {"synchronize", "wait_stream", "Stream", "record_stream", "item", "tolist", "cpu", "nonzero"}
    passed = [
        "ops.py",
        "validation.py",
        "eager.py",
        "fixed_point.py",
        *(f"gpu/{path.name}" for path in (PACKAGE / "gpu").glob("*.py")),
    ]
    for name in passed:
        attributes = {
            node.attr for node in ast.walk(ast.parse((PACKAGE / name).read_text())) if isinstance(node, ast.Attribute)
        }
        assert not attributes & waits, name
