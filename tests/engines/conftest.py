"""What needs the engines, in an environment of its own: `make test-engines`."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import laws

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def poisoned_memory():
    """Not here: torch's deterministic mode would change what the engines do."""


@pytest.fixture(scope="session")
def model():
    return laws.tiny(laws.MODEL)


@pytest.fixture(scope="session")
def draft(model):
    return laws.noisy(model)
