"""The built hub kernel: it loads as documented, offline and in a fresh process, and is laid out as kernel-builder asks."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import torch
from kernels._rust import Build, Digest, DigestAlgorithm, DigestValidationError, Metadata

import spec_verify_xpu as sv
from batches import random_batch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch-ext" / "spec_verify_xpu"
MODULES = sorted(PACKAGE.rglob("*.py"))
BACKENDS = ["cpu", "cuda", "rocm", "xpu"]

build = runpy.run_path(str(ROOT / "tools" / "build_hub.py"))["build"]

# V = 1000 has a partial last chunk; 16 sequences of 4 drafts end at every position.
BATCH = random_batch(16, 4, 1000)
BY_RULE = [x.tolist() for x in BATCH.by_rule()]

LOAD_BATCH = """
import torch
draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, *_ = batch = torch.load("batch.pt")
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with the built tree in build/, and a batch for the fresh processes in batch.pt."""
    folder = tmp_path_factory.mktemp("hub")
    build(ROOT, folder / "build")
    torch.save(tuple(BATCH), folder / "batch.pt")
    return folder


def in_fresh_process(folder, code, **environment):
    """What `code` prints, a literal, in a process without network that finds no installed spec_verify_xpu."""
    hide = "import sys; sys.modules['spec_verify_xpu'] = None\n"
    result = subprocess.run(
        [sys.executable, "-c", hide + LOAD_BATCH + code],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return ast.literal_eval(result.stdout)


def copy_of_sources(folder, appended):
    """The sources as an archive has them, without git, with code appended to modules by name."""
    shutil.copytree(PACKAGE, folder / "torch-ext" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("build.toml", "CARD.md"):
        shutil.copy(ROOT / name, folder)
    for name, code in appended.items():
        module = folder / "torch-ext" / PACKAGE.name / name
        module.write_text(module.read_text() + code)
    return folder


def kernel_id(build_folder, backend="cpu"):
    return Metadata.read_from_file(build_folder / f"torch-{backend}" / "metadata.json").id


@pytest.mark.kernels_ci
def test_usage_block(hub):
    """The card's, which is the README's too."""
    usage = re.search(r"```python\n(.*?)```", (hub / "build" / "CARD.md").read_text(), re.DOTALL)[1]
    assert usage.endswith(
        'sv = get_kernel("phanerozoic/spec-verify-xpu", version=1, trust_remote_code=True)\n'
        "accepted, next_token = sv.verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample)\n"
    )
    assert usage == re.search(r"```python\n(from kernels.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    result = in_fresh_process(
        hub,
        usage + "print([accepted.tolist(), next_token.tolist()])",
        LOCAL_KERNELS=f"phanerozoic/spec-verify-xpu={hub}",
    )
    assert result == BY_RULE


@pytest.mark.kernels_ci
@pytest.mark.parametrize("backend", BACKENDS)
def test_variant(hub, backend):
    """Each loads, and verifies on the CPU, without importing Triton. The CPU's finds none, as in CPU builds of torch."""
    without_triton = "sys.modules['triton'] = None\n" if backend == "cpu" else ""
    code = f"""{without_triton}
from pathlib import Path
from kernels import get_local_kernel
sv = get_local_kernel(Path("build/torch-{backend}"))
print([sv.__name__, sys.modules.get("triton") is None, *(x.tolist() for x in sv.verify(*batch[:5]))])
"""
    assert in_fresh_process(hub, code) == [kernel_id(hub / "build", backend), True, *BY_RULE]


@pytest.mark.kernels_ci
def test_builds_in_one_process(hub, tmp_path):
    """Two builds do not mix. One build loaded by two paths is executed twice, but defines its operators once."""
    shift = """

true_verify = verify


def verify(call):
    true_verify(call)
    call.next_token.add_(1)
"""
    build(copy_of_sources(tmp_path, {"eager.py": shift}), hub / "shifted")
    code = """
from pathlib import Path
from kernels import get_loaded_kernels, get_local_kernel
paths = [Path("build/torch-cpu"), Path("shifted/torch-cpu"), Path("build/torch-cpu").resolve()]
builds = [get_local_kernel(path) for path in paths]
assert len(get_loaded_kernels()) == 3
print([[x.tolist() for x in sv.verify(*batch[:5], impl="eager")] for sv in builds])
"""
    accepted, next_token = BY_RULE
    shifted = [accepted, [token + 1 for token in next_token]]
    assert in_fresh_process(hub, code) == [BY_RULE, shifted, BY_RULE]


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata(hub, backend, tmp_path):
    variant = shutil.copytree(hub / "build" / f"torch-{backend}", tmp_path / "variant")
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert str(metadata.name) == "spec-verify-xpu"
    assert metadata.version == 1
    assert metadata.license == "Apache-2.0"
    assert str(metadata.backend.backend_type).lower() == backend
    assert metadata.id.isidentifier()
    assert metadata.id.startswith(f"_spec_verify_xpu_{backend}_")
    assert f"torch.ops.{metadata.id}\n" in (variant / "_ops.py").read_text()
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    (variant / "rule.py").write_text("")
    with pytest.raises(DigestValidationError):
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_engines_are_left_out(hub):
    assert not list((hub / "build").rglob("*engines*"))


def test_rebuild_is_clean(tmp_path):
    stale = tmp_path / "build" / "torch-cpu" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    build(ROOT, tmp_path / "build")
    assert not stale.exists()


def test_id_without_git(tmp_path):
    """In an archive the id follows the package's files."""
    for name, appended in (("one", {}), ("same", {}), ("other", {"rule.py": "# changed\n"})):
        build(copy_of_sources(tmp_path / name, appended), tmp_path / name / "build")
    one, same, other = (kernel_id(tmp_path / name / "build") for name in ("one", "same", "other"))
    assert one == same != other


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_id_with_git(tmp_path, monkeypatch):
    """In a repository it is the tree's, marked once a tracked file differs."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # a hook of the surrounding repository sets them
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    sources = copy_of_sources(tmp_path / "sources", {})

    def git(*arguments):
        command = ["git", "-C", sources, "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init")
    git("add", ".")
    git("commit", "-m", "sources")
    expected = f"_spec_verify_xpu_cpu_{git('log', '--format=%T')[:7]}"
    build(sources, tmp_path / "build")
    assert kernel_id(tmp_path / "build") == expected
    (sources / "CARD.md").write_text("")
    build(sources, tmp_path / "build")
    assert kernel_id(tmp_path / "build") == expected + "_dirty"


def test_build_toml_and_card(hub):
    """kernel-builder reads the one and renders the other, in Jinja's syntax, to what our build writes."""
    assert [str(backend) for backend in Build.open(ROOT).general.backends] == BACKENDS
    card = jinja2.Template((ROOT / "CARD.md").read_text(), trim_blocks=True, undefined=jinja2.StrictUndefined)
    filled = card.render(repo_id="phanerozoic/spec-verify-xpu", version=1, license="apache-2.0")
    assert (hub / "build" / "CARD.md").read_text().rstrip("\n") == filled
    for name in sv.__all__:
        assert f"`{name}`" in filled


def unprefixed_registrations(source):
    """kernel-builder's lint: functions whose torch.library decorator names its operator without the namespace's prefix."""
    decorators = {"custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap", "register_torch_dispatch"}

    def name_of(node):
        return ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else None

    return [
        definition.name
        for definition in ast.parse(source).body
        for decorator in getattr(definition, "decorator_list", [])
        if name_of(decorator) in decorators and decorator.args and name_of(decorator.args[0]) != "add_op_namespace_prefix"
    ]


def test_operators_are_prefixed():
    assert unprefixed_registrations('@torch.library.register_fake("fixed::verify")\ndef fake(): ...') == ["fake"]
    for module in MODULES:
        assert unprefixed_registrations(module.read_text()) == [], module


def test_layout():
    """One package, without the inner copy that kernel-builder refuses, and a literal list of names, which it reads."""
    assert not (PACKAGE / PACKAGE.name).exists()
    public = [
        ast.literal_eval(node.value)
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and isinstance(node.value, ast.List)
    ]
    assert public == [sv.__all__]
    assert all(hasattr(sv, name) for name in sv.__all__)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports(module):
    """Only relative imports, the standard library, torch, and Triton, which comes with torch; Numba in a module of its own."""
    imported = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module.split(".")[0])
    optional = {"numba", "numpy"} if module.name == "compiled_cpu.py" else set()
    assert imported <= sys.stdlib_module_names | {"torch", "triton"} | optional
