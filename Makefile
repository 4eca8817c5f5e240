# demo and test do all their own set-up: a virtual environment, pinned packages, the embedded model.
.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench bench-peers clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# torch is installed first, so that no other package pulls in a larger build of it.
TORCH := torch==2.13.0
TESTS ?= tests
# All tests of a file run in one process, which starts their servers and loads their models once.
# Three processes keep two cores busy, because tests wait for the programs that they start.
TEST_PROCESSES ?= 3

help:
	@echo "make demo   train the embedded model on sums and show the reward curve (a few minutes)"
	@echo "make test   the test suite"
	@echo "make test-all  the slow tests: servers, crashes, started programs, interpreted Triton kernels"
	@echo "make lint   ruff and pyright"
	@echo "make bench  rollouts and training against transformers and PEFT on this machine (a quarter of an hour)"
	@echo "make bench-peers  all works and all peers (hours; downloads some gigabytes)"
	@echo "make clean  remove everything that these commands made, except the cached model"

demo: $(VENV)/.model
	$(BIN)/python -m planish.recipes.demo

# One thread per process: tiny models gain nothing from two. Bytecode is written once for all
# processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 \
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile

test: $(VENV)/.dev $(VENV)/.model
	$(PYTEST) $(TESTS)

test-all: $(VENV)/.dev $(VENV)/.model
	$(PYTEST) -m "slow and not gpu" --timeout 600 $(TESTS)

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
