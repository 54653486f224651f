# Everything a person or CI runs. `make demo` and `make test` do all the set-up on a fresh Debian or Ubuntu machine (root).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test lint unit lab-test up down machine venv lock faults soak bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: machine venv ## two virtual Sparks, site.yml, a real vLLM as two ranks, one question and its answer
	@$(BIN)/python -m lab.demo

test: machine venv ## lint, types, unit tests, and every behaviour on the lab; leaves nothing behind
	@$(BIN)/python -m tests.suites

lint: venv ## ruff, mypy, yamllint, ansible-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/yamllint --strict .
	$(BIN)/ansible-lint --offline

unit: venv ## unit tests
	$(BIN)/pytest tests/unit

lab-test: machine venv ## the behaviours on the lab alone
	$(BIN)/pytest tests/lab -v

up: machine venv ## bring the lab up and leave it (python3 -m lab for its other verbs)
	@$(BIN)/python -m lab up

down: venv ## take the lab down
	@$(BIN)/python -m lab down

faults: machine venv ## every fault drill on the double and on vLLM, one table an engine (the lab must be up)
	@$(BIN)/python -m tests.faults

soak: machine venv ## an hour of mixed load on the TensorFold double, without a false alarm (--minutes, --here: tests/soak.py)
	@$(BIN)/python -m tests.soak

bench: machine venv ## measure what docs/benchmarks.md shows (the lab must be free)
	@$(BIN)/python -m tests.bench

machine: ## install what the lab needs on this machine
	@scripts/machine-packages

venv: $(VENV)/.complete ## the control host's Python environment

$(VENV)/.complete: requirements/control.txt requirements/test.txt pyproject.toml
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "python environment: installing locked requirements" >&2
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements/test.txt
	@$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

lock: ## resolve requirements/*.in anew (needs uv)
	uv pip compile --quiet --universal --generate-hashes --python-version 3.11 requirements/node.in -o requirements/node.txt
	uv pip compile --quiet --universal --generate-hashes --python-version 3.11 requirements/control.in -o requirements/control.txt
	uv pip compile --quiet --universal --generate-hashes --python-version 3.11 -c requirements/control.txt requirements/test.in -o requirements/test.txt

clean: ## remove the environment and build results (the lab's cache stays: python3 -m lab clean-cache)
	rm -rf $(VENV) .build build *.egg-info
