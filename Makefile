# Each target creates or refreshes .venv by itself; nothing but Python 3.11+ needs to be installed first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help train venv test test-long test-exhaustive mutants lint format bench clean

help: ## Show the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

train: ## Set everything up and train the recipe `tiny` (two to eight minutes on 2 cores)
	@$(PYTHON) scripts/setup_venv.py
	$(BIN)/braid train tiny

venv: ## Create or refresh .venv (a torch >= 2.11 that is already installed is used, not replaced)
	@$(PYTHON) scripts/setup_venv.py dev hf images digits

test: venv ## Run the tests: every pair of choices (about 13 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 -m "not long and not exhaustive"

test-long: venv ## Run the long tests: larger covers, and cases drawn from the commit
	$(BIN)/python -m pytest -n 2 -m long

test-exhaustive: venv ## Run every case that the other targets only sample (hours)
	$(BIN)/python -m pytest -n 2 -m exhaustive

mutants: venv ## Mutation testing: plant faults in a copy of src, list those that no test catches (an hour or more)
	$(BIN)/python -m scripts.mutants

lint: venv ## Check style and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: venv ## Format the code and apply automatic fixes
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: venv ## Run the benchmarks that need no GPU
	$(BIN)/python -m benchmarks

clean: ## Remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
