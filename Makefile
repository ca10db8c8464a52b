# Debian, macOS and CI run the same commands. Nothing is needed but make and Python with its venv module.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Pass PYTHON=... to choose the interpreter of the environment; otherwise the first one that is new enough.
CANDIDATES = $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench matrix clean

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /make \1	/p' $(MAKEFILE_LIST)

demo: $(READY) ## real workers share one quota on a server of their own, then a verdict (under a minute)
	@echo "demo: starts a private server and worker nodes, runs limited tasks, checks every window against the limit"
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(READY) ## all tests; ARGS="-k name" and the like go to pytest
	@echo "test: runs every test; servers are started on free loopback ports and stopped again"
	@$(BIN)/pytest -q $(ARGS)

check: $(READY) ## ruff, format, mypy strict, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layers.py

bench: $(READY) ## benchmarks; ARGS go to them
	@$(BIN)/python -m benchmarks $(ARGS)

matrix: $(READY) ## every way to run a task on Redis and RabbitMQ, into docs/celery.md (ten minutes)
	@$(BIN)/python -m tests.celery_matrix $(ARGS)

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml | $(BIN)/python
	@echo "$(VENV): installing tb_celery from this folder and what its tests need (a minute, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# --clear: what an interrupted or outdated run left behind must not be built upon.
$(BIN)/python:
	@for python in $(CANDIDATES); do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		if ! $$python -c 'import ensurepip, venv' 2>/dev/null; then \
			echo "$$python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; \
			exit 1; \
		fi; \
		echo "$(VENV): making a virtual environment with $$($$python --version)"; \
		exec $$python -m venv --clear $(VENV); \
	done; \
	echo "tb_celery needs Python 3.11 or newer, and none of these is: $(CANDIDATES); name one with make PYTHON=..." >&2; \
	exit 1
