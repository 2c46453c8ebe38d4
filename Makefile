PYTHON ?= python3
BIN := .venv/bin
DEVICE ?= cuda

.PHONY: demo test lint hub test-gpu bench

demo: .venv/installed
	$(BIN)/python examples/demo.py

test: .venv/installed lint hub
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tree that the hub serves: build/torch-{cpu,cuda,rocm,xpu}.
hub: .venv/installed
	$(BIN)/python tools/build_hub.py

# On a machine with a GPU, with the torch and Triton (and pytest, hypothesis, kernels) of that machine's Python.
test-gpu:
	PYTHONPATH=torch-ext $(PYTHON) -m pytest --device $(DEVICE) $(addprefix tests/test_,gpu.py parity.py properties.py ops.py)

bench: .venv/installed
	$(BIN)/python benchmarks/bench.py

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0 -e ".[test,demo,lint]"
	touch $@
