# The two commands of this project: `make demo` and `make test`.  Both make their own environment
# in .venv/ first and reuse it afterwards; PYTHON=/path names the Python to make it with.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
# Changes when what is installed has to change; written last, so that an interrupted
# installation is taken up again by the next run.
STAMP := $(VENV)/.installed
INSTALL_INPUTS := requirements/constraints.txt setup.py pyproject.toml scripts/make_venv.sh \
	scripts/find_python.sh
# Rank processes on one machine talk over the loopback interface and share its cores.
RUN_ENVIRONMENT := OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=$(shell uname | grep -q Darwin && echo lo0 || echo lo)
PYTEST_ARGS ?=

.PHONY: help venv demo test slurm clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

venv: $(STAMP) ## Make or update the environment in .venv/

$(STAMP): $(INSTALL_INPUTS)
	@scripts/make_venv.sh $(VENV)
	@touch $@

demo: $(STAMP) ## Profile, plan and train on this machine as a small mixed cluster
	$(RUN_ENVIRONMENT) $(VENV_PYTHON) -m examples.llama.demo

slurm: ## Install Slurm for its tests (Debian, root)
	scripts/install_slurm.sh

test: $(STAMP) ## Run all tests (PYTEST_ARGS adds arguments)
	@if [[ -n "$${INSTALL_SLURM:-}" ]]; then scripts/install_slurm.sh || true; fi
	$(RUN_ENVIRONMENT) $(VENV_PYTHON) -m pytest tests/unit tests/functional $(PYTEST_ARGS)

clean: ## Remove the environment, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
