# `make demo`, `make test` and `make check` set up everything they need in .venv first.

PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/pip --disable-pip-version-check --no-input --quiet

.PHONY: help setup demo test check format docs clean
.DEFAULT_GOAL := help

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

setup: $(READY) ## create .venv with the pinned development versions

# Passive waiting: on a busy machine, threads that spin for one another make a second into ten.
demo: $(READY) ## run the small Wan example on this machine
	OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive} $(BIN)/omni-attn run examples/wan_tiny.yaml

# The tensors of the tests are small: one thread each is faster than a pool that fights over few cores.
test: $(READY) ## run the tests; ARGS="-k name" narrows them
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(ARGS)

check: $(READY) ## format, lint, strict types, import contracts, freshness of the generated docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.docs --check

format: $(READY) ## format and sort imports in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY) ## write the generated parts of docs/
	$(BIN)/python -m tools.docs

clean: ## remove .venv and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# setuptools and torch come first: torch on its own, so that a CPU build lying at hand is taken, and
# setuptools because the last step builds with the pinned one instead of fetching another.
$(READY): pyproject.toml constraints.txt
	@"$(or $(PYTHON),python3)" -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
		"omni-attn needs Python 3.11 or newer, found %d.%d. Name another one: make PYTHON=python3.11" % v[:2])'
	@echo "Setting up $(VENV) with the versions in constraints.txt; the first time this takes a minute or more."
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) install -c constraints.txt setuptools torch
	$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev,pipelines,viz]"
	@touch $@
