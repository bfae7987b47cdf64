# Everything a checkout needs. `make serve` and `make test` start from nothing but Python, git, make and a C++20 compiler.

MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
SERVE_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
ATTACK_ARGS ?=
SANITIZE_ARGS ?=
ARM_ARGS ?=
SCHEDULES ?= 3000
# Of GPUs that `make compile-gpu` compiles for: 75 is compute capability 7.5.
CAPABILITIES ?= 75 80 90 100 120
# What `make test-gpu` and `make bench-gpu` may take on a GPU, each: both fit into 15 minutes, with a machine's start.
MINUTES ?= 6
# An installed Python, with torch and triton, that these two take in the place of .venv; and what they install for it
# beside, without touching it: this checkout, or wheels.
GPU_PYTHON ?=
GPU_PACKAGES ?= .
# Where torch comes from: an index URL, or "pip" for whatever pip is set up with. Empty: scripts/install decides.
TORCH_INDEX ?=
# The Python that makes .venv. Empty: scripts/install looks for one.
PYTHON ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
KERNELS_LINTED := build/.kernels-linted
KERNEL_SOURCES := $(shell find csrc CMakeLists.txt src/pagemill/_kernels.pyi -type f 2>/dev/null)
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint requirements/lock.txt
MODEL_READY = $(BIN)/pagemill pull $(MODEL)

GPU_SITE := build/gpu-python
GPU_READY := $(if $(GPU_PYTHON),gpu-python,$(BUILT))
GPU_RUN = $(if $(GPU_PYTHON),PYTHONPATH=$(GPU_SITE) $(GPU_PYTHON),$(BIN)/python)

# What Python has compiled is kept in .venv. Else each process that imports torch compiles it anew, for two seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test test-slow test-gpu compile-gpu gpu-python test-minimum test-clients test-ray test-clusters test-faults coverage soak soak-server attack bench bench-gpu screenshots build lint lint-kernels format docs sanitize test-arm wheel clean distclean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Settings: MODEL=$(MODEL) HOST=$(HOST) PORT=$(PORT) SERVE_ARGS= PYTEST_ARGS= BENCH_ARGS= SOAK_ARGS= ATTACK_ARGS= SANITIZE_ARGS= ARM_ARGS= SCHEDULES=$(SCHEDULES) CAPABILITIES=\"$(CAPABILITIES)\" MINUTES=$(MINUTES) GPU_PYTHON= GPU_PACKAGES=$(GPU_PACKAGES) TORCH_INDEX= PYTHON="

serve: $(BUILT)  ## Install what is missing, fetch the model, serve it
	@$(MODEL_READY)
	@exec $(BIN)/pagemill serve $(MODEL) --host $(HOST) --port $(PORT) $(SERVE_ARGS)

test: lint lint-kernels  ## Install what is missing, fetch the model, check style, types and arrows, run the tests
	@$(MODEL_READY)
	@exec $(BIN)/python -m pytest --ignore tests/replicas --numprocesses 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-slow: $(BUILT)  ## Run the further combinations that `make test` leaves out (settings: PYTEST_ARGS)
	@$(MODEL_READY)
	@exec $(BIN)/python -m pytest --numprocesses 2 -m slow $(PYTEST_ARGS)

coverage: $(BUILT)  ## Run the tests and state which lines and branches they reach, in all processes (settings: PYTEST_ARGS)
	@$(MODEL_READY)
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) || { echo "error: tests failed, so nothing is stated" >&2; exit 1; }
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

soak: $(BUILT)  ## Ten minutes of random requests, faults, limits and sizes: no bit may change, no block be lost (settings: SOAK_ARGS)
	@$(MODEL_READY)
	@exec $(BIN)/python -m tests.soak.chaos $(SOAK_ARGS)

soak-server: $(BUILT)  ## Ten minutes of random clients while engine and server are killed, stopped and changed: no answer may be wrong, no block be lost (settings: SOAK_ARGS)
	@$(MODEL_READY)
	@exec $(BIN)/python -m tests.soak.clients $(SOAK_ARGS)

attack: $(BUILT)  ## Ten minutes of hostile HTTP beside another tenant, then damaged stores: no block lost, memory, log, gaps and waits bounded (settings: ATTACK_ARGS)
	@$(MODEL_READY)
	@exec $(BIN)/python tests/attack/attack.py $(ATTACK_ARGS)

bench: $(BUILT)  ## Measure the model's throughput and latency on this machine (settings: BENCH_ARGS)
	@$(MODEL_READY)
	@exec $(BIN)/pagemill bench $(MODEL) $(BENCH_ARGS)

test-gpu: $(GPU_READY)  ## Run the GPU's tests on this machine's GPU within 6 minutes, or without one in Triton's interpreter, into build/gpu-report (settings: MINUTES, GPU_PYTHON, GPU_PACKAGES, PYTEST_ARGS)
	@$(GPU_RUN) -m benchmarks.gpu_report tests --minutes $(MINUTES) -- $(PYTEST_ARGS)

compile-gpu: $(BUILT)  ## Compile all GPU kernels in the usual configurations, without a GPU, and state what each takes: many minutes for each capability (settings: CAPABILITIES)
	@set -e; for script in tests/*/compile*_for_gpus.py; do $(BIN)/python $$script $(CAPABILITIES); done

test-minimum: wheel  ## Run tests of the HTTP server with the oldest versions that pyproject.toml allows of what it stands on (settings: PYTEST_ARGS)
	@$(MODEL_READY)
	@VENV=$(VENV) scripts/test-minimum $(PYTEST_ARGS)

test-clients: $(BUILT)  ## Run suites of LangChain, litellm and Node's openai against a server, installed into build/clients (settings: PYTEST_ARGS)
	@$(MODEL_READY)
	@VENV=$(VENV) scripts/test-clients $(PYTEST_ARGS)

test-ray: $(BUILT)  ## Install Ray into build/ray-venv, then serve replicas, kill replica, engine, front end, cluster and command under clients that stream (settings: PYTEST_ARGS)
	@$(MODEL_READY)
	@VENV=$(VENV) scripts/test-ray $(PYTEST_ARGS)

test-clusters: $(BUILT)  ## Kill every other kind of process under clients that stream, cut a host off, let load add replicas, update all: a quarter of an hour that `make test-ray` leaves out (settings: PYTEST_ARGS)
	@$(MODEL_READY)
	@VENV=$(VENV) scripts/test-ray -m slow $(PYTEST_ARGS)

test-faults: $(BUILT)  ## Draw 3000 schedules of faults between a front end and its replicas, in simulated time (settings: SCHEDULES, PYTEST_ARGS)
	@PAGEMILL_FAULT_SCHEDULES=$(SCHEDULES) exec $(BIN)/python -m pytest tests/distributed/test_fault_schedules.py --timeout 0 $(PYTEST_ARGS)

bench-gpu: $(GPU_READY)  ## Measure kernels and decode steps on this machine's NVIDIA GPU within 6 minutes, into build/gpu-report (settings: MINUTES, GPU_PYTHON, GPU_PACKAGES, BENCH_ARGS=--full)
	@$(GPU_RUN) -m benchmarks.gpu_report benchmarks --minutes $(MINUTES) $(BENCH_ARGS)

build: $(BUILT)  ## Make .venv, install the pinned dependencies, build the kernels

lint: $(BUILT)  ## Check style (ruff), types (mypy) and the architecture's arrows (import-linter)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "error: not formatted as above; run: make format" >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

lint-kernels: $(KERNELS_LINTED)  ## Check the C++ code's format, that each header compiles by itself, and clang-tidy, where it has changed

$(KERNELS_LINTED): $(BUILT) $(KERNEL_SOURCES) scripts/lint-kernels .clang-format .clang-tidy csrc/tests/.clang-tidy
	@scripts/lint-kernels
	@mkdir -p $(@D) && touch $@

format: $(BUILT)  ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp

docs: $(BUILT)  ## Build the documentation's site into build/site; a broken link or anchor fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

screenshots: $(BUILT)  ## Draw the pictures of the page at / into docs/images, with a real server and Chromium
	@$(MODEL_READY)
	@$(BIN)/python scripts/draw_screenshots.py

sanitize: $(BUILT)  ## Run the kernels under the address, undefined-behaviour and thread sanitizers (many minutes of processor time; SANITIZE_ARGS=--short takes the best set only; others: scripts/sanitize)
	@scripts/sanitize $(SANITIZE_ARGS)

test-arm: $(INSTALLED)  ## Compile the kernels for ARM and check them in QEMU, on a processor of each instruction set (settings: ARM_ARGS, as of scripts/test-arm)
	@VENV=$(VENV) scripts/test-arm $(ARM_ARGS)

wheel: $(BUILT)  ## Build dist/*.whl and install it into an empty environment where no compiler can be found
	@scripts/check-wheel

clean:  ## Remove what was built and cached here (keeps .venv and models)
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache $(BUILT)

distclean: clean  ## Remove .venv too
	@rm -rf $(VENV)

$(INSTALLED): pyproject.toml requirements/lock.txt scripts/install
	@VENV=$(VENV) PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" scripts/install
	@touch $@

# pip decides what is old: it takes seconds where nothing in csrc/ has changed, as CMake's folder stays.
gpu-python:
	@$(GPU_PYTHON) -c "import torch, triton" || { echo "error: GPU_PYTHON=$(GPU_PYTHON) needs torch and triton" >&2; exit 1; }
	@$(GPU_PYTHON) -m pip install -qq --disable-pip-version-check --no-deps --no-index --no-build-isolation --upgrade --target $(GPU_SITE) $(GPU_PACKAGES)

# The package itself, editable: Python files are used where they are; kernels are compiled again when their sources change.
$(BUILT): $(INSTALLED) $(KERNEL_SOURCES)
	@echo "building the kernels and installing what is missing"
	@$(PIP_INSTALL) --no-build-isolation --editable '.[dev,docs]'
	@touch $@
