# From a fresh clone: `make tune` tunes a real model, `make test` runs every check but the long ones and those that need a GPU. Both set up .venv first.
# A stamp in .venv remembers each install; pyproject.toml, changed, makes it run again.

PYTHON ?= python3
CONFIG ?= configs/resnet18.yaml
ARGS ?=

BIN := .venv/bin
PYTEST := $(BIN)/pytest -n 2 --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --root-user-action=ignore
# one place says which torch: its line in pyproject.toml
TORCH := $(shell sed -n 's/^ *"\(torch[<>=][^"]*\)",*$$/\1/p' pyproject.toml)

# tests start a cluster of their own; Debian keeps its programs off the PATH, and would start a server at once
HAS_POSTGRES = { command -v initdb || ls /usr/lib/postgresql/*/bin/initdb; } >/dev/null 2>&1
HAS_MALLOCS = [ $$(/sbin/ldconfig -p | grep -c 'libtcmalloc_minimal\.so\|libjemalloc\.so') -ge 2 ]
CLUSTERS = /etc/postgresql-common/createcluster.conf
NO_CLUSTER = mkdir -p $(dir $(CLUSTERS)) && { [ -e $(CLUSTERS) ] || echo "create_main_cluster = false" >$(CLUSTERS); }
APT_INSTALL = DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-confold

.DELETE_ON_ERROR:
.PHONY: help tune test lint unit slow long programs docs site screenshots venv clean

help:
	@echo "make tune [CONFIG=configs/resnet18.yaml] [ARGS='--budget step:256MiB']   tune a training step into its budget"
	@echo "make test    lint, types, the site and all tests but the long ones and those that need a GPU"
	@echo "make lint    ruff and mypy alone; make unit the default tests, make slow the slow ones, make long the long ones"
	@echo "make docs    the documentation as a site in build/site, its generated pages included"
	@echo "make screenshots   the pictures in docs/, from a study run for them: some minutes, chromium"
	@echo "make venv    the environment of the tests alone; make clean takes it away, runs/ stay"

tune: .venv/zoo.stamp
	@$(BIN)/autotune tune $(CONFIG) $(ARGS)

# tests measure memory: they run alone, after what may run side by side
test: .venv/dev.stamp
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint site programs
	@$(MAKE) --no-print-directory --jobs 1 unit
	@$(MAKE) --no-print-directory --jobs 1 slow

# generate writes the pages that have a source elsewhere; site builds all pages, strictly
docs: .venv/dev.stamp
	$(BIN)/python -m docs.generate
	@$(MAKE) --no-print-directory site

site: .venv/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: .venv/dev.stamp
	$(PYTEST)

# pytest exits 5 when no test bears the marker
slow: programs
	$(PYTEST) -m "slow or browser" || [ $$? -eq 5 ]

# not part of `make test`, which has to end within an hour on two slow cores
long: programs
	$(PYTEST) -m long

programs: .venv/dev.stamp
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing chromium" && \
		{ apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 </dev/null; } || true
	@command -v chromium >/dev/null || echo "no chromium: no browser tests"
	@$(HAS_POSTGRES) || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing PostgreSQL, without a server of its own" && \
		{ $(NO_CLUSTER) && apt-get update && $(APT_INSTALL) postgresql; } >/dev/null 2>&1 </dev/null; } || true
	@$(HAS_POSTGRES) || echo "no PostgreSQL: no tests of a shared database; apt-get install postgresql"
	@$(HAS_MALLOCS) || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing tcmalloc and jemalloc" && \
		{ apt-get update && $(APT_INSTALL) libtcmalloc-minimal4 libjemalloc2; } >/dev/null 2>&1 </dev/null; } || true
	@$(HAS_MALLOCS) || echo "no tests of preloaded mallocs; apt-get install libtcmalloc-minimal4 libjemalloc2"

screenshots: .venv/dev.stamp
	$(BIN)/python -m docs.screenshots

venv: .venv/dev.stamp

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) is too old; run make PYTHON=python3.11 or later"; exit 2; } >&2
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 2; } >&2
	$(PYTHON) -m venv .venv

# torch first and alone, so that the resolver keeps the build that it finds (a CPU one, where the index has it)
.venv/torch.stamp: pyproject.toml | .venv/bin/python
	@echo "completing .venv with torch and what this checkout needs: once, some minutes"
	$(PIP) "$(TORCH)"
	@touch $@

.venv/zoo.stamp: pyproject.toml .venv/torch.stamp
	$(PIP) -e ".[zoo]"
	@touch $@

.venv/dev.stamp: pyproject.toml .venv/torch.stamp
	$(PIP) -e ".[zoo,cpsat,dashboard,docs,dev]"
	@touch $@ .venv/zoo.stamp

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
