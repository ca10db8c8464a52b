# Debian, macOS, Windows (with the shell of Git) and CI run the same commands. Nothing is needed but make and Python with
# its venv module.

VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
INTERPRETER := $(BIN)/python$(if $(filter Windows_NT,$(OS)),.exe)
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
PORTABLE := bucket feedback layers limiter orders platforms public rejected settings shadow spreading stores turns verify
# Pass PYTHON=... to choose the interpreter of the environment; otherwise the first one that is new enough.
CANDIDATES = $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-faults portable versions check bench matrix docs dist clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /make \1	/p' $(MAKEFILE_LIST)

demo: $(READY) ## real workers share one quota on a server of their own, then a verdict (under a minute)
	@echo "demo: starts a private server and worker nodes, runs limited tasks, checks every window against the limit"
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(READY) ## all tests; ARGS="-k name" and the like go to pytest
	@echo "test: runs every test; servers are started on free loopback ports and stopped again"
	@$(BIN)/pytest -q -n auto --dist worksteal $(or $(ARGS),--ignore=tests/faults)
	@$(if $(ARGS),,$(BIN)/pytest -q tests/faults) # by themselves: their processes ask as fast as they can

test-faults: $(READY) ## every fault, on real processes, into docs/reliability.md (some minutes; as root, all of them)
	@$(BIN)/python -m tests.faults $(ARGS)

portable: $(READY) ## the tests that need neither a server nor a Unix: what CI runs on macOS and Windows, too
	@$(BIN)/pytest -q -m "not server" $(PORTABLE:%=tests/test_%.py) $(ARGS)

versions: $(READY) ## all tests on every supported Python that is here, and with the oldest packages; ARGS go to nox
	@$(BIN)/nox $(ARGS)

check: $(READY) ## ruff, format, mypy strict, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 -p tb_celery
	$(BIN)/pytest -q tests/test_layers.py

bench: $(PEERS) ## benchmarks beside other limiters (forty minutes); ARGS go to them
	@$(BIN)/python -m benchmarks $(ARGS)

matrix: $(READY) ## every way to run a task on Redis and RabbitMQ, into docs/celery.md (ten minutes)
	@$(BIN)/python -m tests.celery_matrix $(ARGS)

docs: $(READY) ## the documentation, into build/docs; a warning is an error
	@$(BIN)/python -m sphinx -q -W --keep-going docs build/docs $(ARGS)
	@echo "docs: open build/docs/index.html"

dist: $(READY) ## what is released, into dist
	@$(BIN)/python -m build --no-isolation --outdir dist $(ARGS)

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml | $(INTERPRETER)
	@echo "$(VENV): installing tb_celery from this folder and what its tests need (a minute, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(PEERS): $(READY)
	@echo "$(VENV): installing what the benchmarks measure beside tb_celery (a minute, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench,dev]'
	@touch $@

# --clear: what an interrupted or outdated run left behind must not be built upon.
$(INTERPRETER):
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
