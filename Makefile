# The two commands: `make course` runs every chapter headlessly, `make test` runs every test.
# Set-up (labkit/bootstrap.py) is done once and again only when its inputs change.
#   make course ARGS="--chapters 00,02 -p group_size=64"
#   make test   ARGS="-k quant"

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help setup setup-dev course lab test lint doctor clean

help:
	@echo "make course   run all chapters headlessly, results in results/course/index.html"
	@echo "make lab      open JupyterLab at chapter 00"
	@echo "make test     lint, types and all tests"
	@echo "make doctor   what this machine has, and what to mend"

setup:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found. Fix: install it, or make PYTHON=/path/to/python3 …"; exit 2; }
	@$(PYTHON) labkit/bootstrap.py --venv $(VENV)

setup-dev:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found. Fix: install it, or make PYTHON=/path/to/python3 …"; exit 2; }
	@$(PYTHON) labkit/bootstrap.py --venv $(VENV) --extras dev

course: setup
	@$(BIN)/labkit course $(ARGS)

lab: setup
	@$(BIN)/jupyter lab notebooks/00_start_here.ipynb $(ARGS)

doctor: setup
	@$(BIN)/labkit doctor $(ARGS)

lint: setup-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
