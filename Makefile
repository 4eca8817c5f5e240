# demo and test set themselves up: a virtual environment, pinned packages, the embedded model. Nothing else is needed.
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench bench-peers clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# A wheel of exactly this torch is installed first, so that no other package draws in a larger one.
TORCH := torch==2.13.0
TESTS ?= tests
# Their many processes compile our modules once.
# Of one thread each: tiny models gain nothing from two. A file's tests stay in one, which makes its servers and models once. One more
# than there are cores on the smallest machine, since a quarter of the time is waiting for processes that are started.
TEST_PROCESSES ?= 3

help:
	@echo "make demo   train the embedded model on sums and show the reward curve (a few minutes)"
	@echo "make test   the test suite; the slow tests, which CI runs too: make test TESTS=\"tests -m slow\""
	@echo "make lint   ruff and pyright"
	@echo "make bench  rollouts and training against transformers and PEFT on this machine (a quarter of an hour)"
	@echo "make bench-peers  all works and all peers (hours; downloads some gigabytes)"
	@echo "make clean  remove what the others made, except the cached model"

demo: $(VENV)/.model
	$(BIN)/python -m planish.recipes.demo

test: $(VENV)/.dev $(VENV)/.model
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.model
	$(BIN)/python benchmarks/compare.py

bench-peers: $(VENV)/.model
	$(BIN)/python benchmarks/compare.py name=peers peers=all works=all

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.model: $(VENV)/.run
	$(BIN)/planish models --fetch
	touch $@

clean:
	rm -rf $(VENV) .peers build dist *.egg-info runs/demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
