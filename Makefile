# SPDX-License-Identifier: LGPL-3.0-or-later
# `make demo` and `make test` set up everything they need by themselves.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := .requirements/torch-2.11.txt
BUILD := build/torch-2.11
SOURCES := $(shell find ops plugin registration python_shims .cmake -type f \
             -not -name '*.pyc' 2>/dev/null) CMakeLists.txt pyproject.toml README.md
CPP_TESTS := $(shell find tests/cpp tests/torchscript -type f -not -name '*.pyc' 2>/dev/null)

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t18

prerequisites:
	@missing=""; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
	  2>/dev/null || missing="$$missing python3-dev"; \
	[ -e /usr/include/gtest/gtest.h ] || missing="$$missing libgtest-dev"; \
	if [ -n "$$missing" ]; then \
	  echo "deepmd-prewarm: missing$$missing. Install with:" >&2; \
	  echo "  apt-get update && apt-get install -y$$missing" >&2; exit 1; fi

setup: prerequisites $(VENV)/.installed ## create .venv with the pinned dependencies

$(VENV)/.installed: $(LOCK)
	@echo "[1/2] .venv: pinned dependencies of $(LOCK) (about 5 GB, torch and deepmd-kit)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check uv==0.13.9
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync $(LOCK)
	@touch $@

build: setup $(VENV)/.built ## build the library and install the package into .venv

# One build tree serves the wheel and the C++ tests.
$(VENV)/.built: $(VENV)/.installed $(SOURCES) $(CPP_TESTS)
	@echo "[2/2] building libdeepmd_prewarm.so, the bridge and the C++ tests in $(BUILD)"
	@VIRTUAL_ENV=$(VENV) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/uv pip install -q \
	  --no-deps --no-build-isolation --reinstall-package deepmd-prewarm . \
	  -C build-dir=$(BUILD) -C cmake.define.DEEPMD_PREWARM_TESTS=ON \
	  -C cmake.define.DEEPMD_PREWARM_WERROR=ON \
	  -C cmake.define.DEEPMD_PREWARM_BENCH=AUTO
	@touch $@

# clang-tidy costs 27 s a file: only files that differ from the last landing.
# In a fresh clone of what landed: the last commit.
TIDY_BASE ?= $(shell b=$$(git merge-base HEAD origin/main 2>/dev/null || true); if [ -n "$$b" ] && [ "$$b" != "$$(git rev-parse HEAD)" ]; then echo $$b; else git rev-parse -q --verify HEAD~1 || true; fi)
CPP_FILES = $(shell git ls-files -co --exclude-standard '*.cpp' '*.h' '*.cu')
CMAKE_FILES = $(shell git ls-files -co --exclude-standard '*CMakeLists.txt' '*.cmake')

lint: build ## clang-format, clang-tidy on changed files, cmake-format, ruff, mypy, docstrings
	@echo "lint: clang-format, cmake-format, ruff, mypy, docstring coverage"
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	@$(BIN)/cmake-format --check $(CMAKE_FILES)
	@$(BIN)/ruff format --check -q .
	@$(BIN)/ruff check -q .
	@$(BIN)/mypy
	@$(BIN)/interrogate -q python_shims
	@changed=$$(git diff --name-only --diff-filter=d $(TIDY_BASE) -- 'ops/*.cpp' 'plugin/*.cpp' 'registration/*.cpp'); \
	if [ -n "$$changed" ]; then echo "lint: clang-tidy" $$changed; \
	  echo $$changed | xargs -n1 -P2 $(BIN)/clang-tidy -p $(BUILD) --quiet 2>/dev/null; fi

test-cpp: build
	@cd $(BUILD) && $(CURDIR)/$(BIN)/ctest -j2 --output-on-failure

test-python: build
	@$(BIN)/python -m pytest -m "not faults" -n 2 --dist loadfile

test: build lint test-cpp test-python ## everything (CI runs this)
	@echo "make test: all passed"

test-trainer: build ## only deepmd-kit's real trainer (part of test): bitwise equality, two ranks
	@$(BIN)/python -m pytest -m trainer

test-faults: build ## the long suites: fault matrix, 10,000 random tensor webs
	@$(BIN)/python -m pytest -m faults

bench: build ## speed and memory, ratios side by side in one run
	@$(BIN)/python tests/bench/run.py

demo: build ## a real 2-rank multi-task deepmd-kit training on CPU, prewarmed
	@$(BIN)/python -m deepmd_prewarm.cli demo --out build/demo

lock: ## refresh the lock file from .requirements/dev.in
	@$(BIN)/uv pip compile -q .requirements/dev.in --python-version 3.11 \
	  --no-header --no-annotate -o $(LOCK)

clean: ## remove builds, keep .venv
	@rm -rf build $(VENV)/.built

.PHONY: help prerequisites setup build lint test-cpp test-python test \
  test-trainer test-faults \
  bench demo lock clean
