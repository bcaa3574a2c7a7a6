# Each target makes or refreshes .venv by itself; nothing needs to be installed first but Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help train venv test test-long test-exhaustive mutants lint format bench clean

help: ## Show the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

train: ## Set everything up and train the recipe `tiny` (two to eight minutes on 2 cores)
	@$(PYTHON) scripts/setup_venv.py
	$(BIN)/braid train tiny

venv: ## Make or refresh .venv (a torch >= 2.11 that is already here is used, not replaced)
	@$(PYTHON) scripts/setup_venv.py dev hf

test: venv ## Run the tests: every pair of choices (7 to 9 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 -m "not long and not exhaustive"

test-long: venv ## Run the long tests: larger covers, and cases drawn from the commit
	$(BIN)/python -m pytest -n 2 -m long

test-exhaustive: venv ## Run whole products of cases of which the other tests hold samples (hours)
	$(BIN)/python -m pytest -n 2 -m exhaustive

mutants: venv ## Plant faults in a copy of src and see which ones the tests miss (hours on 2 cores)
	$(BIN)/python -m scripts.mutants

lint: venv ## Check style and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: venv ## Rewrite the code in the house style
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: venv ## Run the benchmarks that need no GPU
	$(BIN)/python -m benchmarks

clean: ## Remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
