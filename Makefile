# Everything a fresh machine needs is python3 (3.10 or newer) with pip, and make.
# The first target that needs it creates .venv; the stamp files keep later runs from reinstalling.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e
# What the type checker reads, as far as it exists.
TYPED  := $(wildcard src examples benchmarks)
# Where Debian keeps ip and tc; not on everybody's path.
export PATH := $(PATH):/usr/sbin:/sbin
# Programs that tests start would compile all of the package each time.
unexport PYTHONDONTWRITEBYTECODE
# Test files are shared among this many processes, each with ranks of its own; in which order, says
# tests/conftest.py.
WORKERS ?= 3
SHARED  := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST  := $(BIN)/python -m pytest $(SHARED)
# Extra arguments: make unit ARGS="-k ranks -x"
ARGS   ?=

.DEFAULT_GOAL := help
# What the native core is built from: when it changes, the package is installed anew.
NATIVE := setup.py $(wildcard src/paceline/native/*.[ch] src/paceline/native/*/*.[ch])

.PHONY: help demo test test-all test-slow test-alone test-torch wheel lint types unit conformance bench soak docs screenshots clean iproute2 chromium launchers contenders compiler
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo ## torch's DDP beside Paceline's, and a rank that dies (ARGS="--ranks 4")
	@$(BIN)/paceline demo $(ARGS)

# Types are checked beside the tests, of which many wait; what is wrong is said in the end.
test: lint iproute2 chromium ## lint, types, and the tests that show that it works
	@mkdir -p build; $(MAKE) -s types > build/types.log 2>&1 & types=$$!; \
	PACELINE_EXAMPLES=few $(PYTEST) -m "not slow" $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat build/types.log; exit $$((tests ? tests : types))

test-all: test-slow test-alone ## what `make test` leaves out: attacks, soaks, timing, large runs

# ARGS may leave no test to one of the two: pytest says 5.
NONE_LEFT = $(if $(ARGS),|| test $$? = 5)
test-slow: $(VENV)/.installed-frameworks iproute2 chromium launchers
	$(PYTEST) -m "(slow or hypothesis) and not alone" $(ARGS) $(NONE_LEFT)

# In one process: they measure, and would measure the other worker.
test-alone: $(VENV)/.installed-frameworks iproute2 chromium contenders
	$(BIN)/python -m pytest -m alone $(ARGS) $(NONE_LEFT)

lint: $(VENV)/.installed-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## mypy --strict
	$(BIN)/mypy $(TYPED)

unit: $(VENV)/.installed-dev iproute2 ## some tests in one process: make unit ARGS="tests/shm -k abort"
	$(BIN)/python -m pytest --ignore=tests/conformance $(ARGS)

conformance: $(VENV)/.installed-dev ## torch's own DDP tests, on our class
	$(BIN)/python -m pytest tests/conformance $(ARGS)

bench: $(VENV)/.installed-dev ## paceline bench ddp, or ARGS="NAME ..." (benchmarks/README.md)
	$(BIN)/python -m benchmarks $(ARGS)

# Elastic jobs, 10 minutes in 6 pieces. A piece that failed says what repeats it.
SECONDS ?= 600
PIECES  ?= 6
soak: $(VENV)/.installed-dev ## elastic jobs whose ranks are killed at random (SECONDS=600 PIECES=6 SEED=1)
	$(BIN)/python -m tests.elastic.soak --seconds $(SECONDS) --pieces $(PIECES) $(if $(SEED),--seed $(SEED)) $(ARGS)

docs: $(VENV)/.installed-docs ## the docs as web pages, in build/docs; a warning fails
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

screenshots: $(VENV)/.installed-dev chromium ## the pictures of the report's page in docs/
	$(BIN)/python -m tests.report.screenshots

wheel: $(VENV)/.installed-dev ## an sdist and a manylinux wheel in dist/, tried without a compiler
	$(INSTALL) ".[wheel]"
	rm -rf build/wheel && $(BIN)/python -m build --outdir build/wheel .
	mkdir -p dist && cp build/wheel/*.tar.gz dist/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair -w dist build/wheel/*.whl
	$(BIN)/python -m pytest tests/packaging
	@ls dist

# With another Python, too: make test-torch VERSION=2.15.0 PYTHON=python3.13
# It tests what is committed, in a clone of its own: installing builds the native core in src/, below
# the feet of whatever runs from there.
OTHER := build/torch-$(VERSION)$(patsubst %,-%,$(filter-out python3,$(notdir $(PYTHON))))
CLONE := $(OTHER)/paceline
test-torch: iproute2 compiler ## the tests with another torch: make test-torch VERSION=2.15.0
	@test -n "$(VERSION)" || { echo 'which torch? make test-torch VERSION=2.15.0'; exit 2; }
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	test -d $(CLONE) || git init -q $(CLONE)
	git -C $(CLONE) fetch -q "$(CURDIR)" HEAD && git -C $(CLONE) checkout -q --detach FETCH_HEAD
	$(OTHER)/bin/python -m pip install --disable-pip-version-check "torch==$(VERSION)" -e "$(CLONE)[dev]"
	cd $(CLONE) && ../bin/python -m pytest $(SHARED) -m "not slow" $(ARGS)

clean: ## remove the environment, caches and build output
	rm -rf $(VENV) build dist out src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f src/paceline/native/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call absent,what,packages,tests): say that tests will be skipped, or fail if PACELINE_REQUIRE names it.
absent = { echo "$(2) could not be installed: $(3) will be skipped"; \
  case ",$$PACELINE_REQUIRE," in *",$(1),"*) echo "PACELINE_REQUIRE names $(1)" >&2; false;; esac; }

# $(call debian,program,packages,tests,what): install what tests need, as root on Debian; else they skip.
debian = command -v $(1) >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
  || { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $(2); } \
  || $(call absent,$(4),$(2),$(3))

iproute2:
	@$(call debian,tc,iproute2,tests on several hosts,hosts)

chromium:
	@$(call debian,chromium,chromium,tests of the page of paceline report,chromium)

launchers:
	@$(call debian,slurmctld,slurm-wlm munge,tests under Slurm,slurm)
	@$(call debian,mpirun,openmpi-bin,tests under mpirun,mpirun)

# Who else takes part in `paceline bench allreduce` and, with PYTHONPATH=build/torchft, in `paceline
# bench elastic`. DeepSpeed has a folder of its own, as the frameworks would find it, and change;
# torchft, as it asks for a torch that need not be ours.
contenders: build/deepspeed/.installed build/torchft/.installed
	@$(BIN)/python -c 'import mpi4py' 2>/dev/null || $(INSTALL) ".[mpi]" \
	  || echo "MPI could not be installed: its benchmarks will not be tested"

build/deepspeed/.installed: | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target build/deepspeed \
	  deepspeed hjson ninja py-cpuinfo einops && touch $@ \
	  || { rm -rf build/deepspeed; echo "DeepSpeed could not be installed: its test will be skipped"; }

build/torchft/.installed: | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target build/torchft torchft && touch $@ \
	  || { rm -rf build/torchft; echo "torchft could not be installed: paceline bench elastic runs without"; }

# The native core of the shared-memory group needs a C compiler and Python's headers. Without them
# the package works over gloo, and its tests of shared memory skip and say so.
compiler:
	@$(PYTHON) -c 'import os, shutil, sys, sysconfig; sys.exit(not (shutil.which("cc") and os.path.exists(sysconfig.get_path("include") + "/Python.h")))' \
	  || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	  || { apt-get -qq update && apt-get -qq install --no-install-recommends gcc libc6-dev python3-dev; } \
	  || echo "there is no C compiler: the shared-memory group will not be built"

# A python3 without ensurepip (Debian without python3-venv) gets its pip from the one outside.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"Paceline needs Python 3.10 or newer, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) \
	  && $(PYTHON) -m pip --python $(BIN)/python install pip; }

$(VENV)/.installed-demo: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python compiler
	$(INSTALL) ".[demo]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python compiler
	$(INSTALL) ".[dev]"
	@touch $@ $(VENV)/.installed-demo $(VENV)/.installed-docs

# Lightning, Accelerate, Transformers, Ray: 0.7 GB, half a minute where the network is good. If one
# cannot be had, the others are installed without it.
$(VENV)/.installed-frameworks: $(VENV)/.installed-dev
	$(INSTALL) ".[frameworks,wheel]" && touch $@ \
	  || { for extra in lightning accelerate transformers ray beside wheel; do \
	         $(INSTALL) ".[$$extra]" || echo "$$extra could not be installed"; done; \
	       $(call absent,frameworks,all frameworks,tests of those that are missing); }

$(VENV)/.installed-docs: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python compiler
	$(INSTALL) ".[docs,ps,testing]"
	@touch $@
