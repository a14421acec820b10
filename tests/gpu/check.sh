#!/usr/bin/env bash
# SPDX-License-Identifier: LGPL-3.0-or-later
# Proves the CUDA and NCCL parts on a machine with one GPU and no package index:
# builds library and bridge against its Python, runs tests/gpu, prints one table,
# leaves gpu.json, gpu.xml and the build's log in $OUT. Under 4 minutes.
#
#   tests/gpu/check.sh             all of it
#   tests/gpu/check.sh --dry-run   checks tools, lists the tests, builds nothing
#
# PYTHON names another interpreter, JOBS the number of compilers, WORK the build
# folder. Wheels of missing packages (pydantic) are taken from .whl/.
#
# Exit codes: 0 all passed; 1 a test failed; 2 a tool is missing or the build
# failed; 3 no CUDA device.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2

dry_run=0
for argument in "$@"; do
  case "$argument" in
    --dry-run) dry_run=1 ;;
    *)
      echo "check.sh: expected --dry-run or nothing, got '$argument'" >&2
      exit 2
      ;;
  esac
done

PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-$(nproc)}
WORK=${WORK:-/tmp/deepmd_prewarm_gpu}
OUT=${OUT:-$WORK/out}
mkdir -p "$OUT" "$WORK"
started=$SECONDS

step() { printf '\n[%3d s] %s\n' $((SECONDS - started)) "$*"; }
fail() {
  echo "check.sh: $1" >&2
  exit "$2"
}

step "tools"
scripts=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))') ||
  fail "no Python at '$PYTHON'" 2
export PATH="$scripts:$PATH"
for tool in g++ cmake ninja; do
  command -v $tool >/dev/null || fail "no $tool on the PATH" 2
done
"$PYTHON" -c 'import torch, pytest; print("torch", torch.__version__)' ||
  fail "'$PYTHON' has no torch or no pytest" 2
command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] ||
  fail "no nvcc on the PATH" 2

if compgen -G '.whl/*.whl' >/dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target "$WORK/wheels" .whl/*.whl || fail "pip refused .whl/" 2
fi
export PYTHONPATH="$WORK/site:$WORK/wheels${PYTHONPATH:+:$PYTHONPATH}"

if [ $dry_run = 1 ]; then
  step "tests that a device would run"
  "$PYTHON" -m pytest tests/gpu --collect-only -q -p no:cacheprovider ||
    fail "the tests cannot be collected" 2
  echo "check.sh: dry run, nothing was built or run"
  exit 0
fi

"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  fail "no CUDA device: torch.cuda.is_available() is False" 3

step "build ($JOBS jobs)"
{
  cmake -S . -B "$WORK/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$("$PYTHON" -c 'import sys; print(sys.executable)')" \
    -DDEEPMD_PREWARM_TESTS=OFF -DDEEPMD_PREWARM_BENCH=OFF \
    -DDEEPMD_PREWARM_CUDA=ON -DDEEPMD_PREWARM_NCCL=ON \
    -DCMAKE_CXX_FLAGS_RELEASE=-O1 &&
    cmake --build "$WORK/build" -j "$JOBS" &&
    rm -rf "$WORK/site" && mkdir -p "$WORK/site" &&
    cp -r python_shims/deepmd_prewarm "$WORK/site/" &&
    cmake --install "$WORK/build" --prefix "$WORK/site/deepmd_prewarm"
} >"$OUT/build.log" 2>&1 || {
  tail -n 40 "$OUT/build.log"
  fail "the build failed, see build.log" 2
}
# What an installer would leave: the package asks for its own version.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
mkdir -p "$WORK/site/deepmd_prewarm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: deepmd-prewarm\nVersion: %s\n' "$version" \
  >"$WORK/site/deepmd_prewarm-$version.dist-info/METADATA"

step "tests"
export GPU_JSON="$OUT/gpu.json"
export TORCHINDUCTOR_CACHE_DIR="$WORK/inductor"
"$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider --tb=short \
  --junitxml="$OUT/gpu.xml"
status=$?

step "table"
"$PYTHON" tests/gpu/table.py "$GPU_JSON"
step "done, files in $OUT"
[ $status = 0 ] || exit 1
