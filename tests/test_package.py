"""The package as a user meets it: imports, the report, and the code of the documentation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code, **environment):
    """A fresh Python process with the package on its path and without the interpreter's switch."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(ROOT / "torch-ext"), **environment},
        capture_output=True,
        text=True,
    )


def test_import_takes_no_optional_library():
    """Importing, and verifying with eager, brings in neither Triton nor Numba nor a hub library."""
    code = """
import sys, torch
before = set(sys.modules)
import spec_verify_xpu as sv
one = torch.ones(1, 2, 3) / 3
sv.verify(torch.zeros(1, 1, dtype=torch.int64), one[:, :1], one, impl="eager")
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert not new & {"triton", "numba", "kernels", "huggingface_hub", "numpy", "hypothesis"}, new
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_engines_are_imported_on_use(engine):
    paths = os.pathsep.join((str(ROOT / "torch-ext"), str(ROOT / "engines")))
    result = run(f"import sys, spec_verify_engines.{engine}; assert '{engine}' not in sys.modules", PYTHONPATH=paths)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("library", ["triton", "numba"])
def test_works_without_optional_library(library):
    """CPU builds of torch have no Triton: eager and the reference run, and asking by name is an error that says why."""
    code = f"""
import sys
sys.modules["triton"] = sys.modules["numba"] = None
import torch, spec_verify_xpu as sv
one = torch.ones(1, 2, 3) / 3
for impl in ("auto", "eager", "reference"):
    sv.verify(torch.zeros(1, 1, dtype=torch.int64), one[:, :1], one, impl=impl)
try:
    sv.verify(torch.zeros(1, 1, dtype=torch.int64), one[:, :1], one, impl="{library}")
except ValueError as error:
    assert str(error).startswith("impl: expected {library.capitalize()}"), error
else:
    raise AssertionError("no error")
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_an_unusable_numba_is_as_none(tmp_path):
    """Installed but refusing to import, as it does beside a NumPy that is too new: auto takes eager, by name it is an error."""
    (tmp_path / "numba.py").write_text('raise ImportError("Numba needs NumPy 2.2 or less")')
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch, spec_verify_xpu as sv, spec_verify_xpu.__main__ as report
one = torch.ones(1, 2, 3) / 3
sv.verify(torch.zeros(1, 1, dtype=torch.int64), one[:, :1], one)
raise SystemExit(report.main())
"""
    result = run(code)
    assert result.returncode == 0 and "got: Numba needs NumPy 2.2 or less" in result.stdout, result.stderr


@pytest.mark.parametrize(
    "module",
    ["rule", "fixed_point", "reference", "eager", "compiled_cpu", "validation", "ops", "repeats", "api", "masks", "metrics"],
)
def test_imports_flow_one_way(module):
    """rule imports nothing of ours; implementations do not import one another, nor what calls them."""
    allowed = {
        "rule": set(),
        "fixed_point": {"rule"},
        "reference": {"rule"},
        "eager": {"rule", "fixed_point"},
        "validation": {"rule"},
        "ops": {"_ops", "gpu", "compiled_cpu", "eager", "reference"},
        "compiled_cpu": {"fixed_point", "rule"},
        "repeats": {"ops", "gpu.handles"},
        "api": {"ops", "repeats", "rule", "validation"},
        "masks": {"_ops", "fixed_point", "rule", "validation"},
        "metrics": {"validation"},
    }
    source = (ROOT / "torch-ext/spec_verify_xpu" / f"{module}.py").read_text()
    found = set(re.findall(r"from \.([\w.]+) import", source)) | set(re.findall(r"from \. import (\w+)", source))
    assert found <= allowed[module]


def test_report():
    result = run("import runpy; runpy.run_module('spec_verify_xpu', run_name='__main__')", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"triton +52 of 52 sequences equal the rule\n +numba +52 of 52.*\n +eager +52 of 52", result.stdout)
    assert "all equal to the rule" in result.stdout


def test_report_fails_on_a_mismatch():
    code = """
import spec_verify_xpu.eager as eager, spec_verify_xpu.__main__ as report
right = eager.verify
def wrong(call):
    right(call)
    call.next_token.add_(1)
eager.verify = wrong
raise SystemExit(report.main())
"""
    result = run(code)
    assert result.returncode == 1 and "MISMATCH" in result.stdout, result.stderr


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS.remove(ROOT / "docs" / "ENGINES.md")  # tests/engines runs it, with its engines


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_run(document):
    """Every Python block of a document, in order, in one process; the hub's block has a test of its own."""
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    code = "\n".join(block for block in blocks if "get_kernel" not in block)
    result = run(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["api", "masks", "metrics"])
def test_docstring_examples(module):
    result = run(f"import doctest, spec_verify_xpu.{module} as module; raise SystemExit(doctest.testmod(module).failed)")
    assert result.returncode == 0, result.stdout


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
