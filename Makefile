SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu bench lint fix lock clean

PYTHON_BIN := .venv/bin/python
ARGS ?=

help:  ## Say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo 'ARGS="..." is handed to the command; PYTHON=... chooses the interpreter of .venv.'

setup:  ## Make .venv and install what is missing (all others but clean call it)
	@scripts/setup.sh

demo: setup  ## Run the quick start (examples/quickstart)
	@scripts/demo.sh $(ARGS)

test: setup  ## Run every test that needs no GPU: unit, then Ray, then simulators
	@$(PYTHON_BIN) -m pytest -m "not gpu" $(ARGS)

test-gpu: setup  ## Run the tests that need a GPU
	@$(PYTHON_BIN) -m pytest -m gpu $(ARGS)

bench: setup  ## Run the core benchmarks, quickly, into outputs/bench
	@for name in group_forward prefix_reuse memory; do \
	  $(PYTHON_BIN) -m benchmarks.core.$$name --quick --page outputs/bench/$$name.md --json outputs/bench/$$name.json $(ARGS); \
	done

lint:  ## Check style, format, types and layers
	@scripts/setup.sh --python-only
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright
	@.venv/bin/lint-imports

fix:  ## Mend what ruff can mend
	@scripts/setup.sh --python-only
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

lock:  ## Write requirements/lock.txt from what is installed in .venv
	@scripts/setup.sh --python-only
	@$(PYTHON_BIN) scripts/lock.py

clean:  ## Remove .venv, caches and build products; never outputs/ or demos/
	@rm -rf .venv .setup.lock .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	@find . -path ./outputs -prune -o -path ./demos -prune -o -name __pycache__ -type d -exec rm -rf {} +
