# The commands of this project: `make demo`, `make test`, `make test-full` and `make lint`.  They make their own environment
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
INSTALL_INPUTS := requirements/constraints.txt requirements/hashes.txt setup.py pyproject.toml scripts/make_venv.sh \
	scripts/find_python.sh
# Rank processes on one machine talk over the loopback interface and share its cores.
RUN_ENVIRONMENT := OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=$(shell uname | grep -q Darwin && echo lo0 || echo lo)
PYTEST_ARGS ?=
DOCTOR_ARGS ?=
GPU_CHECK_ARGS ?=

.PHONY: help venv requirements audit demo demo-elastic demo-docs doctor docs gpu-check test test-full test-torch test-upstream lint slurm chromium \
	clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(STAMP) ## Make or update the environment in .venv/

$(STAMP): $(INSTALL_INPUTS)
	@scripts/make_venv.sh $(VENV)
	@touch $@

demo: $(STAMP) ## Profile, plan and train on this machine as a small mixed cluster
	$(RUN_ENVIRONMENT) $(VENV_PYTHON) -m examples.llama.demo

demo-elastic: $(STAMP) ## Train on three nodes of this machine, kill a worker, and go on until it is back
	$(RUN_ENVIRONMENT) $(VENV_PYTHON) -m examples.llama.elastic_demo

doctor: $(STAMP) ## Check this machine as a small mixed cluster (DOCTOR_ARGS=--break puts faults in)
	$(RUN_ENVIRONMENT) $(VENV_PYTHON) -m examples.llama.doctor $(DOCTOR_ARGS)

gpu-check: $(STAMP) ## What only a GPU can show, in under nine minutes (GPU_CHECK_ARGS adds arguments)
	$(VENV_PYTHON) -m benchmarks.gpu.check $(GPU_CHECK_ARGS)

slurm: ## Install Slurm for its tests (Debian, root)
	scripts/install_slurm.sh

chromium: ## Install the browser for the tests of the report page (Debian, root)
	scripts/install_chromium.sh

test: TIER :=
test: ## Run the tests of every change, in under 20 minutes on 2 cores (PYTEST_ARGS adds arguments)
test-full: TIER := --full
test-full: ## Run all tests, before a release or at night (PYTEST_ARGS adds arguments)

test test-full: $(STAMP)
	@if [[ -n "$${INSTALL_SLURM:-}" ]]; then scripts/install_slurm.sh || true; fi
	@if [[ -n "$${INSTALL_CHROMIUM:-}" ]]; then scripts/install_chromium.sh || true; fi
	$(RUN_ENVIRONMENT) scripts/run_tests.sh $(TIER) $(VENV_PYTHON) $(PYTEST_ARGS)

test-torch: ## Unit tests and a training per schedule with another torch, in an environment of its own (TORCH=2.11.0)
	scripts/test_torch.sh "$(TORCH)" $(PYTEST_ARGS)

test-upstream: $(STAMP) ## Run Megatron-core's own unit tests that need no GPU, of the checkout MEGATRON_LM_PATH
	$(RUN_ENVIRONMENT) $(VENV_PYTHON) tests/upstream/run.py

docs: $(STAMP) ## Renew the pages that are made from the code, and the tutorial's outputs
	$(VENV_PYTHON) scripts/make_docs.py

demo-docs: $(STAMP) ## Run the demo on an idle machine, and renew its figures and picture in README.md
	$(RUN_ENVIRONMENT) $(VENV_PYTHON) -m examples.llama.demo --readme

requirements: $(STAMP) ## Write digests and the list of packages anew, after a change of requirements/constraints.txt (needs uv)
	$(VENV)/bin/python scripts/requirements.py lock
	$(VENV)/bin/python scripts/requirements.py list

audit: ## Look up known vulnerabilities of the pinned packages (needs pip-audit and the network)
	pip-audit --disable-pip --require-hashes --requirement requirements/hashes.txt

lint: $(STAMP) ## Check format, style, types and structure
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV_PYTHON) -m pytest -q -k this_tree tests/unit/benchmarks/test_structure.py

clean: ## Remove the environment, caches and build outputs; runs/ stays
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
