# quickstart and test do everything, from a clean clone on: the environment is made on the first call and left alone on the next.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# -qq hides pip's progress and its warnings about unused package sources; errors still show.

.PHONY: quickstart test check bench clean

quickstart: .venv/.installed .venv/.installed-server
	$(BIN)/rlhf run recipes/quickstart/recipe.yaml

# One thread a worker: WORKERS processes share the cores, each taking whole files, so that what a file sets up on a server is set up once.
test: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -q -n $(WORKERS) --dist loadfile --session-timeout=2400

# What CI runs: style, types, and the rules about the tree.
check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy -p rlhf -p annotation
	$(BIN)/python -m pytest -rs -q tests/architecture

bench: .venv/.installed
	$(BIN)/python -m benchmarks.dpo_vs_trl --json

# Environment, caches and build leftovers. Runs are kept: they hold models. So is the annotation server's environment, in the user's cache.
clean:
	rm -rf .venv .mypy_cache .ruff_cache build dist prefloop.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "Python 3.11 or newer is needed, $(PYTHON) is" \
	  "$$($(PYTHON) --version 2>/dev/null || echo missing). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

# torch first and alone: with the version named, a CPU build is taken where the package sources offer one.
.venv/.installed: .venv/.python pyproject.toml constraints.txt
	@echo "Installing into .venv: a few minutes, once."
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) -e .
	@touch $@

# The annotation server has an environment of its own. Tests that need it are skipped, and say so, where it is missing.
.venv/.installed-server: .venv/.installed annotation/server/requirements.lock
	$(BIN)/annotation install
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "Installing what the tests and checks need."
	$(INSTALL) -e '.[test,check]'
	@touch $@
