"""Every kernel in every configuration compiles for GPUs that are not here, without fp64 and without atomics."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile_only import KERNELS, KERNELS_OF_ENGINES

TESTS = Path(__file__).parent


@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx1100"])
def test_compiles(target, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(str(TESTS.parent / name) for name in ("torch-ext", "engines"))
    result = subprocess.run(
        [sys.executable, str(TESTS / "compile_only.py"), target], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == {*KERNELS, *KERNELS_OF_ENGINES}
    assert len(kernels) > 40
    assert all(kernel["fp64"] == kernel["atomics"] == 0 for kernel in kernels), kernels
    assert all(kernel.get("called_as_known", True) for kernel in kernels), kernels
