# Two commands: `make lab` (learn) and `make test` (check everything). Both set up first.
# Variables: PYTHON, VENV, CPU, TORCH_INDEX, NB, ARGS, JOBS; `make help` explains them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NB ?=
ARGS ?=
JOBS ?= 2
CPU ?=
TORCH_INDEX ?= $(if $(filter-out 0 no,$(CPU)),https://download.pytorch.org/whl/cpu)

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
NBVAL = $(PYTEST) notebooks --nbval --nbval-current-env --nbval-sanitize-with tests/sanitize.cfg \
	--nbval-cell-timeout 180 --timeout 300 -n $(JOBS) --dist loadscope

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup lab run test lint registers unit lessons refresh doctor bench gpu clean

help:
	@echo "make lab       set up if needed, open JupyterLab at the first lesson"
	@echo "make test      set up if needed, run every check that CI runs"
	@echo "make run       execute all lessons, print time and memory of each   (NB=06: that one)"
	@echo "make refresh   execute lessons twice and store their outputs        (NB=06: that one)"
	@echo "make doctor    what works on this machine, and what a missing piece costs"
	@echo "make bench     time the launcher against PyTorch's own ways to start workers"
	@echo "make gpu       build, check and time every kernel on an NVIDIA GPU  (ARGS=matmul: those)"
	@echo "make setup     only set up            make clean   remove $(VENV) and caches"
	@echo
	@echo "CPU=1          Linux without an NVIDIA GPU: take PyTorch's CPU build (first set-up only)"
	@echo "PYTHON=...     the Python to build $(VENV) from (3.10 or newer)"
	@echo "ARGS=\"...\"     more arguments: make lab ARGS=\"--no-browser --port 9000\""
	@echo "TORCH_INDEX=   another index that holds PyTorch builds      JOBS=2  parallel test processes"

# --- set-up: made again only when pyproject.toml, or the Python under the environment, changed ---

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "No '$(PYTHON)' here. Install Python 3.10 or newer, or name yours: make PYTHON=/path/to/python3"; \
	  exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$$("$(PYTHON)" --version) is too old: 3.10 or newer is needed. Name one: make PYTHON=python3.12"; \
	  exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: its venv module is not installed."; \
	  echo "On Debian and Ubuntu: sudo apt install python3-venv. Then run make again."; \
	  exit 1; }
	"$(PYTHON)" -m venv "$(VENV)" || { rm -rf "$(VENV)"; exit 1; }

$(VENV)/.ready-lab: pyproject.toml $(BIN)/python
	@$(hint)
	$(BIN)/python -m pip install $(INDEX) -e .
	@touch $@

$(VENV)/.ready-test: pyproject.toml $(BIN)/python
	@$(hint)
	$(BIN)/python -m pip install $(INDEX) -e '.[test]'
	@touch $@ $(VENV)/.ready-lab

INDEX = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
hint = if [ "$$(uname -s)" = Linux ] && [ -z "$(TORCH_INDEX)" ] \
	  && ! command -v nvidia-smi >/dev/null 2>&1 \
	  && ! $(BIN)/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then \
	  echo "No NVIDIA GPU seen. CPU=1 ('make lab CPU=1') takes PyTorch's CPU build and saves"; \
	  echo "gigabytes of CUDA libraries; press Ctrl-C now if you want that."; \
	fi

setup: $(VENV)/.ready-test

# --- for learners ---

# In a container one is root, and Jupyter would refuse to start.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)

lab: $(VENV)/.ready-lab
	$(BIN)/jupyter-lab --ServerApp.root_dir="$(CURDIR)" $(AS_ROOT) $(ARGS) \
	  notebooks/00_start_here.ipynb

run: $(VENV)/.ready-lab
	$(BIN)/playbook run $(NB) $(ARGS)

doctor: $(VENV)/.ready-lab
	$(BIN)/playbook doctor $(ARGS)

bench: $(VENV)/.ready-test
	$(BIN)/python benchmarks/launch.py $(ARGS)

# Not yet run on a GPU; without one it says so in one line.
gpu: $(VENV)/.ready-test
	$(BIN)/python -m kernels.gpu $(ARGS)

# --- for authors ---

# Each lesson runs with the newest and with the oldest instructions, and is stored if both agree:
# so lessons need not run twice in `make test`. ARGS=--check writes nothing.
refresh: $(VENV)/.ready-lab
	$(BIN)/playbook refresh $(NB) $(ARGS)

# In order of cost; the first that fails stops the rest and is named in make's last line.
test: lint registers unit lessons
	@echo "make test: all checks passed."

lint: $(VENV)/.ready-test
	@echo "== lint: ruff, mypy, import contracts"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What nvcc makes of each kernel for three generations of GPUs; where there is none, it says so.
registers: $(VENV)/.ready-test
	@echo "== registers: what each CUDA kernel takes of a GPU"
	$(BIN)/python -m kernels.resources

unit: $(VENV)/.ready-test
	@echo "== unit: the tests"
	$(PYTEST) tests -p no:nbval -n $(JOBS) --dist worksteal $(ARGS)

lessons: $(VENV)/.ready-test
	@echo "== lessons: each is run, and compared with the outputs stored in it"
	$(NBVAL)

clean:
	rm -rf "$(VENV)" build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
