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
CMAKE_DEFINES := DEEPMD_PREWARM_BENCH=AUTO
# All of this names the first torch; the same rules serve the second one, in a
# tree made for being built whole: torch's headers are most of the work.
WHOLE := CMAKE_UNITY_BUILD=ON CMAKE_UNITY_BUILD_BATCH_SIZE=16 DEEPMD_PREWARM_PCH=ON \
  CMAKE_CXX_FLAGS_RELEASE=-O0
SECOND := VENV=.venv-2.15 BUILD=build/torch-2.15 LOCK=.requirements/torch-2.15.txt \
  CMAKE_DEFINES="$(WHOLE)"
SOURCES := $(shell find ops plugin registration python_shims .cmake -type f \
             -not -name '*.pyc' 2>/dev/null) CMakeLists.txt pyproject.toml README.md
CPP_TESTS := $(shell find tests/cpp tests/torchscript -type f -not -name '*.pyc' 2>/dev/null)

help: ## what can be made
	@grep -hE '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t18

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
	@echo "[1/2] $(VENV): pinned dependencies of $(LOCK) (about 5 GB)"
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
	  $(addprefix -C cmake.define.,$(CMAKE_DEFINES))
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

test: build lint test-cpp test-python test-2.15 ## everything (CI runs this)
	@echo "make test: all passed"

build-2.15: ## the same for torch 2.15, in .venv-2.15 and build/torch-2.15
	@$(MAKE) build $(SECOND)

# The shims wherever torch's private parts or its headers matter. Not here: what
# needs deepmd-kit (3.2.0 pins torch 2.11), the command line, reports, meetings, and
# what calls torch by its public names (they pass: make test-2.15 SECOND_TESTS=...).
SECOND_TESTS := $(patsubst %,tests/python/test_%.py,cache compile_cache \
  compile_counters effects effects_handles library release release_holders \
  release_refusals scalars survival tasks torch_limits warmup warmup_compile)

test-2.15: build-2.15 ## C++ and shim tests with torch 2.15 (part of test)
	@$(MAKE) test-cpp $(SECOND)
	@.venv-2.15/bin/python -m pytest -m "not faults" -n 2 --dist loadfile $(SECOND_TESTS)

# Addresses and undefined behaviour over all C++ tests, threads over those that
# start some. torch is not instrumented: tsan.supp leaves its inside out.
# report_mutex_bugs: g++ 12's TSan does not see pthread_mutex_clocklock, and so calls
# each unlock after a timed lock one "of an unlocked mutex".
THREADED := compiled_task_test process_watch_test rank_agreement_test \
  release_trace_inputs_test sync_ranks_test warmup_compiled_test
test-asan: setup ## C++ tests under ASan + UBSan, then TSan
	@for kind in address,undefined thread; do \
	  tree=build/sanitize-$${kind%%,*}; \
	  $(BIN)/cmake -S . -B $$tree -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DDEEPMD_PREWARM_BRIDGE=OFF \
	    -DDEEPMD_PREWARM_TESTS=ON -DDEEPMD_PREWARM_SANITIZE=$$kind \
	    $(addprefix -D,$(WHOLE)) >/dev/null; \
	done
	@$(BIN)/cmake --build build/sanitize-address
	@cd build/sanitize-address && $(CURDIR)/$(BIN)/ctest -j2 --output-on-failure
	@$(BIN)/cmake --build build/sanitize-thread --target $(THREADED)
	@cd build/sanitize-thread && for test in $(THREADED); do \
	  TSAN_OPTIONS=report_mutex_bugs=0:suppressions=$(CURDIR)/tests/cpp/tsan.supp \
	  tests/$$test --gtest_brief=1; done

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
  build-2.15 test-2.15 test-asan \
  test-trainer test-faults \
  bench demo lock clean
