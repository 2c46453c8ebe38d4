PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint hub bench

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

# On a machine with a GPU, in the environment that has its torch and Triton.
test-gpu:
	$(PYTHON) tools/build_hub.py
	PYTHONPATH=torch-ext $(PYTHON) -m pytest -m gpu

bench: .venv/installed
	$(BIN)/python benchmarks/bench.py

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0 -e ".[test,demo,lint]"
	touch $@
