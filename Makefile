# demo and test do all their own set-up: a virtual environment, pinned packages, the embedded model.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-extras test-vllm lint docs site dist release bench bench-peers clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The packages of the extras, above those of $(VENV): torch is installed once.
EXTRAS_VENV := .venv-extras
# An installation that fails is tried once more, because a registry may have been out of reach.
define PIP_INSTALL
echo "pip install $(2)"; \
	install() { $(1)/bin/python -m pip install --disable-pip-version-check --quiet $(2); }; \
	install || { echo "pip failed; trying once more" >&2; sleep 10; install; }
endef
# torch is installed first, so that no other package pulls in a larger build of it.
TORCH := torch==2.13.0
TESTS ?= tests
# Coding agents are programs of their own, which npm installs beside the extras.
CODEX := @openai/codex@0.171.0
CLAUDE_CODE := @anthropic-ai/claude-code@2.1.332
# What the tests of the console need: its chart library as published, and a checker of accessibility.
CONSOLE_PACKAGES := uplot@1.6.32 axe-core@4.14.1
# The second line has clients of the server's /v1 endpoints, the third what the recipes of
# tinker-cookbook import, and the fourth what builds the site.
EXTRAS := 'planish[inspect,ray,trackio,verifiers]' trl bitsandbytes sentencepiece playwright perfetto \
	anthropic langchain-openai litellm openai-agents 'lm-eval[api]' 'pydantic-ai-slim[openai]' \
	aiohttp blobfile cloudpickle pylatexenc termcolor tiktoken \
	mkdocstrings-python zensical
# The tests that are skipped, in whole or in part, where these packages are not installed.
EXTRAS_TESTS ?= tests/test_doc_servers.py tests/console/test_console_browser.py tests/console/test_server_console_browser.py tests/console/test_two_questions.py tests/cookbook tests/evaluation/test_inspect.py tests/evaluation/test_inspect_logs.py tests/export/test_trl.py tests/fleet/test_fleet_recipe.py tests/fleet/test_ray_faults.py tests/fleet/test_ray_fleet.py tests/fleet/test_ray_rollouts.py tests/fleet/test_served_fleet.py \
	tests/datasets/test_trl_files.py tests/model/layers/test_bitsandbytes.py \
	tests/model/sources/test_sentencepiece_oracle.py tests/recipes/test_fresh_runs.py \
	tests/renderers/test_renderer_oracles.py \
	tests/rl/test_verifiers_env.py tests/runlog/test_metrics_log.py tests/server/openai tests/test_site.py \
	tests/server/test_session_timeline.py tests/test_tokenizer.py \
	tests/server/messages/test_anthropic_client.py tests/server/messages/test_claude_code.py \
	tests/server/test_served_images.py
# All tests of a file run in one process, which starts their servers and loads their models once.
# Three processes keep two cores busy, because tests wait for the programs that they start. The
# processes of `make test` share out the files before they read them, which saves a tenth of the
# time. The times of the other tests vary more, so a process takes its next file when it is ready.
TEST_PROCESSES ?= 3
# Pythons besides $(PYTHON) with which `make release` installs and tries the wheel.
PYTHONS ?= python3.12 python3.13

help:
	@echo "make demo   train the embedded model on sums and show the reward curve (a few minutes)"
	@echo "make setup  a virtual environment in .venv, with all that the tests need"
	@echo "make test   the test suite"
	@echo "make test-all  the slow tests: servers, crashes, started programs, interpreted Triton kernels"
	@echo "make test-extras  tests with the real Inspect, verifiers, Trackio, TRL, sentencepiece, OpenAI clients and tinker-cookbook"
	@echo "make test-vllm  install vLLM for CPUs (gigabytes), and sample from it"
	@echo "make lint   ruff, pyright, and the limits of sizes and imports"
	@echo "make docs   write docs/reference/file-tree.md"
	@echo "make site   build the documentation as a site, with search and the reference of Python: build/site/html"
	@echo "make dist   wheel and sdist, checked for missing files, in dist/"
	@echo "make release  the same, installed and tried with PYTHONS, with hashes and a bill of materials"
	@echo "make bench  rollouts and training against transformers and PEFT on this machine (a quarter of an hour)"
	@echo "make bench-peers  all works and all peers (hours; downloads some gigabytes)"
	@echo "make clean  remove everything that these commands made, except the cached model"

setup: $(VENV)/.dev

demo: $(VENV)/.model
	$(BIN)/python -m planish.recipes.demo

# One thread per process: tiny models gain nothing from two. Bytecode is written once for all
# processes.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 \
	$(1)/bin/python -m pytest -n $(TEST_PROCESSES)

test: $(VENV)/.dev $(VENV)/.model
	$(call PYTEST,$(VENV)) --dist each --share-files --max-worker-restart 0 \
		-o console_output_style=classic $(TESTS)

test-all: $(VENV)/.dev $(VENV)/.model
	$(call PYTEST,$(VENV)) --dist loadfile -m "slow and not gpu" --timeout 600 $(TESTS)

# A skipped test fails the run here.
test-extras: $(EXTRAS_VENV)/.made $(VENV)/.model
	PATH=$(abspath $(EXTRAS_VENV))/node_modules/.bin:$$PATH \
	$(call PYTEST,$(EXTRAS_VENV)) --dist loadfile -m "not gpu" --timeout 600 --no-skips $(EXTRAS_TESTS)

test-vllm: $(VENV)/.dev $(VENV)/.model
	PLANISH_VLLM_PYTHON=$$($(BIN)/python benchmarks/environments.py vllm | tail -1) \
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m vllm --timeout 1800 tests/fleet/test_vllm.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tools/code_size.py

docs:
	$(PYTHON) tools/file_tree.py

site: $(EXTRAS_VENV)/.made
	$(EXTRAS_VENV)/bin/python tools/build_site.py

dist: $(VENV)/.dev
	$(BIN)/python tools/release.py dist

release: $(VENV)/.dev
	$(BIN)/python tools/release.py release $(PYTHONS)

bench: $(VENV)/.model
	$(BIN)/python benchmarks/compare.py

bench-peers: $(VENV)/.model
	$(BIN)/python benchmarks/compare.py name=peers peers=all workloads=all

$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
		f"planish needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}; name another one: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv $(VENV)
	@$(call PIP_INSTALL,$(VENV),-c constraints.txt $(TORCH))
	@$(call PIP_INSTALL,$(VENV),-c constraints.txt -e .)
	touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(call PIP_INSTALL,$(VENV),-c constraints.txt -e '.[dev]')
	touch $@

# The .pth file puts the packages of $(VENV), pip among them, behind those of $(EXTRAS_VENV).
# tinker-cookbook comes without its requirements, because pip finds no tml-renderers 0.4, and
# instructor because it excludes the jiter that openai needs. It works with that jiter.
$(EXTRAS_VENV)/.made: $(VENV)/.dev constraints-extras.txt
	$(BIN)/python -m venv --clear --without-pip $(EXTRAS_VENV)
	base=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(EXTRAS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$base')" > "$$own/base.pth"
	@$(call PIP_INSTALL,$(EXTRAS_VENV),-c constraints-extras.txt --no-compile $(EXTRAS))
	@$(call PIP_INSTALL,$(EXTRAS_VENV),-c constraints-extras.txt --no-deps tinker-cookbook instructor)
	install() { npm install --no-audit --no-fund --silent --prefix $(EXTRAS_VENV) $(CODEX) $(CLAUDE_CODE) $(CONSOLE_PACKAGES); }; \
	install || { echo "npm failed; trying once more" >&2; sleep 10; install; }
	touch $@

$(VENV)/.model: $(VENV)/.run
	$(BIN)/planish models --fetch
	touch $@

clean:
	rm -rf $(VENV) $(EXTRAS_VENV) .peers build dist *.egg-info runs/demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
