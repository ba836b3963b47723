# Everything runs in one virtual environment, .venv, made on first use and brought up to date when
# pyproject.toml or constraints.txt changed. PYTHON chooses the interpreter it is made with (3.11 or newer).
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install test lint demo clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## make or update .venv with everything the targets below need

# A .venv without its stamp is a half-finished one and is made anew; with a stamp it is updated in place.
# torch comes first and by name, so that a build installed or offered by the machine is taken as it is.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else \
		f"Python 3.11 or newer is needed, $(PYTHON) is {v}. Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@[ -e $(STAMP) ] || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(STAMP)
	@echo "Installing into $(VENV); the first time this takes some minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

test: lint  ## install, lint, type-check, check the import contracts, run all tests
	$(BIN)/python -m pytest --durations=15

lint: install  ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

demo: install  ## a sweep, its report, the chosen run and a live-retuned training, on this machine
	$(BIN)/python benchmarks/demo.py

clean:  ## remove .venv, build outputs and caches; runs/ stays
	rm -rf $(VENV) build dist ./*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
