"""Build the tree that the hub serves: build/torch-{cpu,cuda,rocm,xpu} and the card.

Each variant is the package with an operator namespace of its own and the metadata that the `kernels` library reads. The
layout and the ids are what the hub's kernel-builder makes of a kernel in pure Python.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where the kernels library brings tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def build(root, destination):
    config = tomllib.loads((root / "build.toml").read_text())
    general = config["general"]
    python_name = general["name"].replace("-", "_")
    package = root / "torch-ext" / python_name
    unique = unique_id(root, package)

    for old in destination.glob("torch-*"):
        shutil.rmtree(old)
    for backend in general["backends"]:
        variant = destination / f"torch-{backend}"
        shutil.copytree(package, variant, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        kernel_id = f"_{python_name}_{backend}_{unique}"
        ops = variant / "_ops.py"
        ops.write_text(ops.read_text().replace(python_name, kernel_id))
        metadata = {
            "name": general["name"],
            "id": kernel_id,
            "version": general["version"],
            "kernels-minver": "0.14.0",  # as kernel-builder asks of a kernel without dependencies
            "license": general["license"],
            "python-depends": [],  # torch brings Triton, which may not be named here
            "kernel-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digests(variant)},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2))
        print(f"{variant.name}: {kernel_id}")

    values = {
        "repo_id": general["hub"]["repo-id"],
        "version": str(general["version"]),
        "license": general["license"].lower(),
    }
    card = (root / "CARD.md").read_text()
    (destination / "CARD.md").write_text(re.sub(r"{{ (\w+) }}", lambda match: values[match[1]], card))


def unique_id(root, package):
    """Git's id of the tree, marked where tracked files differ from it. Without git (an archive), one of the package's files.

    Two builds in one process mix their modules if they share an id.
    """
    git = ["git", "--git-dir", root / ".git", "--work-tree", root]  # not of a repository that an archive lies in
    try:
        tree = subprocess.run([*git, "rev-parse", "HEAD^{tree}"], capture_output=True, check=True, text=True).stdout
        differs = subprocess.run([*git, "diff", "--quiet", "HEAD"]).returncode
    except (OSError, subprocess.CalledProcessError):
        return hashlib.sha256(json.dumps(digests(package)).encode()).hexdigest()[:7]
    return tree[:7] + ("_dirty" if differs else "")


def digests(directory):
    """The sha256 of every file by its path, both as the kernels library computes and compares them."""
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {
        name: base64.b64encode(hashlib.sha256(files[name].read_bytes()).digest()).decode()
        for name in sorted(files)
        if not name.endswith(".pyc")
    }


if __name__ == "__main__":
    build(ROOT, ROOT / "build")
