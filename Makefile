# `make quickstart` and `make test` need nothing but Python 3.11+, make and the package index.
# Paths are relative, so that the checkout may lie anywhere, also below a directory with a space in its name.
SHELL := /bin/sh
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := images/constraints.txt
# torch comes first and by exact version, so that a CPU build on the index is taken where there is one.
TORCH ?= torch==2.13.0
# The first interpreter that is 3.11, 3.12 or 3.13. Override with `make PYTHON=/path/to/python3.12 test`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  "$$p" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && { echo "$$p"; break; }; done)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help quickstart test test-slow test-cluster lint types imports docs format lock reference methods clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r t d; do printf '  make %-12s %s\n' "$$t" "$$d"; done

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11, 3.12 or 3.13 is needed, with its venv and ensurepip modules (on Debian or Ubuntu: apt install python3-venv); none was found. Set PYTHON=/path/to/python3." >&2; exit 5; fi
	@echo "Creating $(VENV) with $(PYTHON)"
	@rm -rf $(VENV)
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "The venv module failed: on Debian or Ubuntu, install python3-venv." >&2; exit 5; }

$(VENV)/.all: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	@echo "Installing torch, then llm-blueprints (minutes the first time)"
	@$(BIN)/python -m pip install --quiet "$(TORCH)" || $(BIN)/python -m pip install --quiet torch
	@$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.all
	@echo "Installing the development tools"
	@$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

quickstart: $(VENV)/.all ## Install, then fine-tune the embedded model on the embedded data
	@$(BIN)/blueprints train quickstart

test: $(VENV)/.dev lint types imports ## Install, then lint, types, import contracts and tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.dev ## The slow tests: random kills, whole runs, large files
	@$(BIN)/python -m pytest -m slow

test-cluster: ## End to end in the cluster that KUBECONFIG names (Kubernetes with Kubeflow Trainer 2.3)
	@if [ -z "$$KUBECONFIG" ]; then echo "KUBECONFIG is not set: name the kubeconfig of a cluster with Kubeflow Trainer 2.3, such as KUBECONFIG=~/.kube/config make test-cluster" >&2; exit 2; fi
	@$(MAKE) --no-print-directory $(VENV)/.dev
	@$(BIN)/python -m pytest -m cluster tests/test_cluster.py

lint: $(VENV)/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(VENV)/.dev
	@$(BIN)/python -m mypy

imports: $(VENV)/.dev
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev ## Format the code and sort imports
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.dev ## Build the documentation site into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

reference: $(VENV)/.dev ## Write the recipe reference and the JSON schema anew
	@$(BIN)/python -m blueprints.recipe.reference > docs/recipe.md
	@$(BIN)/blueprints schema > blueprints/recipe/schema.json

methods: $(VENV)/.dev ## Write the table of tested methods anew, from the marks of the tests
	@$(BIN)/python tests/methods_table.py > docs/methods.md.new && mv docs/methods.md.new docs/methods.md

lock: $(VENV)/.dev ## Pin in images/constraints.txt what is installed now
	@$(BIN)/python -m pip freeze --exclude-editable | grep -v '^torch==' | LC_ALL=C sort -f > $(CONSTRAINTS)
	@touch $(VENV)/.all $(VENV)/.dev

clean: ## Remove the environment and everything built
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
