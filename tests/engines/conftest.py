"""What needs the engines, in an environment of its own: `make test-engines`. test_vllm_v2.py runs elsewhere too."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("transformers") is None:
    collect_ignore = ["test_llm.py", "test_transformers.py", "test_vllm.py"]
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
