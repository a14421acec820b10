# SPDX-License-Identifier: LGPL-3.0-or-later
"""libdeepmd_prewarm_cuda.so: built where it can be, loaded where it is needed.

There is no driver here: one is made, a library that only notes what it is asked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from fresh_process import output
from library_copies import LIBRARY

ROOT = Path(__file__).parents[2]
CUDA_LIBRARY = LIBRARY.with_name("libdeepmd_prewarm_cuda.so")
is_built = pytest.mark.skipif(
    not CUDA_LIBRARY.exists(), reason="built without CUDA, see the build's output"
)
needs_no_driver = pytest.mark.skipif(
    torch.cuda.is_available(), reason="has a driver of its own"
)

# Whatever creates a context, or initializes the driver, is written down by name.
DRIVER = """
#include <cstdio>
#include <cstdlib>
static int note(const char* name) {
  if (const char* path = std::getenv("FAKE_DRIVER_LOG")) {
    if (std::FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s\\n", name);
      std::fclose(file);
    }
  }
  return 0;
}
extern "C" {
int cuInit(unsigned) { note("cuInit"); return 100; }
int cuCtxCreate_v2(void**, unsigned, int) { note("cuCtxCreate_v2"); return 100; }
int cuCtxCreate_v4(void**, void*, unsigned, int) {
  note("cuCtxCreate_v4"); return 100; }
int cuDevicePrimaryCtxRetain(void**, int) {
  note("cuDevicePrimaryCtxRetain"); return 100; }
int cuCtxSetCurrent(void*) { note("cuCtxSetCurrent"); return 100; }
int cuGetProcAddress_v2(const char* name, void**, int, unsigned long, void*) {
  note("cuGetProcAddress_v2"); note(name); return 500; }
int cuDriverGetVersion(int* version) {
  note("cuDriverGetVersion"); *version = 13010; return 0; }
int cuDeviceGetCount(int* count) { note("cuDeviceGetCount"); *count = 3; return 0; }
int cuDeviceGet(int* device, int index) { *device = 40 + index; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0; *active = device == 41; return 0; }
}
"""


def compile_library(source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    file = target.with_suffix(".cpp")
    file.write_text(source)
    command = ["g++", "-shared", "-fPIC", "-o", str(target), str(file)]
    subprocess.run([*command, f"-Wl,-soname,{target.name}"], check=True)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver's library."""
    folder = tmp_path_factory.mktemp("driver")
    compile_library(DRIVER, folder / "libcuda.so.1")
    return folder


def with_driver(driver: Path, log: Path, code: str, **more: str) -> str:
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver)} | more
    environment["FAKE_DRIVER_LOG"] = str(log)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needed(library: Path) -> list[str]:
    listed = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", listed)


def test_the_operator_library_and_the_bridge_need_neither_cuda_nor_nccl():
    spec = find_spec("deepmd_prewarm._bridge")
    assert spec is not None and spec.origin is not None
    for library in (LIBRARY, Path(spec.origin)):
        names = needed(library)
        assert "libtorch_cpu.so" in names
        found = [n for n in names if re.search("cuda|cudart|nccl|nvrtc", n)]
        assert found == [], library


def test_it_is_built_where_torch_and_the_machine_have_cuda():
    site = Path(torch.__file__).parents[1]
    headers = [*site.glob("nvidia/*/include/cuda_runtime_api.h")]
    if not torch.version.cuda or not (headers or shutil.which("nvcc")):
        pytest.skip("no CUDA headers here")
    assert CUDA_LIBRARY.exists()
    names = needed(CUDA_LIBRARY)
    for start in ("libtorch_cuda.so", "libcudart.so", "libnccl.so"):
        assert any(name.startswith(start) for name in names), names
    # A host without a driver must be able to link and to start it.
    assert not [name for name in names if name.startswith("libcuda.so")]


@is_built
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_what_nvcc_compiled_is_in_it():
    # Its sections and strings: a wheel's libraries come without symbol tables.
    sections = subprocess.run(
        ["readelf", "-SW", str(CUDA_LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ".nv_fatbin" in sections
    assert b"add_own_index" in CUDA_LIBRARY.read_bytes()  # the kernel's name


@is_built
@needs_no_driver
def test_a_host_without_a_driver_never_loads_it():
    code = """
from deepmd_prewarm._library import bridge
state, text, versions = bridge().device_extension()
assert state == "absent" and "no NVIDIA driver" in text, (state, text)
assert versions == [] and bridge().device_contexts() == []
assert "libdeepmd_prewarm_cuda" not in open("/proc/self/maps").read()
print("END")
"""
    assert output(code) == "END"


@is_built
@needs_no_driver
def test_with_a_driver_it_loads_tells_versions_and_makes_no_context(driver, tmp_path):
    code = """
import torch
from deepmd_prewarm._library import bridge
state, text, versions = bridge().device_extension()
assert state == "loaded", text
told = dict(versions)
assert told["driver for CUDA"] == "13.1", told
assert told["built for CUDA"].split(".")[0] == torch.version.cuda.split(".")[0]
assert told["NCCL"] == ".".join(str(n) for n in torch.cuda.nccl.version()), told
assert bridge().device_contexts() == [1]
assert not torch.cuda.is_initialized()
print("END")
"""
    log = tmp_path / "log"
    assert with_driver(driver, log, code).strip() == "END"
    asked = log.read_text().split()
    assert "cuDriverGetVersion" in asked
    forbidden = [name for name in asked if re.search("Ctx|cuInit", name)]
    assert forbidden == []


@is_built
@needs_no_driver
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", "is damaged"),
        (
            'extern "C" void* deepmd_prewarm_device_extension(const char*,'
            " const char*) { return nullptr; }",
            "was built for another version",
        ),
        ("int other;", "undefined symbol"),
    ],
    ids=["damaged", "another version", "without its entry"],
)
def test_one_that_does_not_load_is_a_line_of_the_doctor_and_no_exception(
    wrong, said, driver, tmp_path
):
    copy = tmp_path / "lib" / LIBRARY.name
    copy.parent.mkdir()
    shutil.copy(LIBRARY, copy)
    broken = copy.with_name(CUDA_LIBRARY.name)
    if wrong:
        compile_library(wrong, broken)
    else:
        broken.write_bytes(CUDA_LIBRARY.read_bytes()[:5000])
    code = """
import torch, deepmd_prewarm
from deepmd_prewarm.doctor import _device
found = _device()
print(found.good, found.text)
deepmd_prewarm.safe_empty_cache("cuda")
model = torch.nn.Linear(2, 2)
task = deepmd_prewarm.CompiledTask.from_callable("task", model)
deepmd_prewarm.warmup_compiled(task, [torch.ones(1, 2)])
assert task.is_warm()
print("END")
"""
    said_there = with_driver(
        driver, tmp_path / "log", code, DP_PREWARM_LIBRARY=str(copy)
    )
    assert said_there.startswith("False"), said_there
    assert said in said_there and "Training works" in said_there
    assert said_there.strip().endswith("END")


def options(*given: str) -> subprocess.CompletedProcess[str]:
    """Let CMake decide what to build, without building anything."""
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
    return subprocess.run(
        [cmake, *given, "-P", str(ROOT / ".cmake/cuda_found.cmake")],
        capture_output=True,
        text=True,
        check=False,
    )


def words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stdout + done.stderr).split())


def test_build_options_are_auto_on_or_off_and_on_names_what_is_missing(tmp_path):
    empty = f"-DDEEPMD_PREWARM_TORCH_LIB={tmp_path}/torch/lib"
    torch_lib = f"-DDEEPMD_PREWARM_TORCH_LIB={Path(torch.__file__).parent}/lib"
    assert "to be AUTO, ON or OFF, got 'MAYBE'" in words(
        options(empty, "-DDEEPMD_PREWARM_CUDA=MAYBE")
    )
    done = options(empty, "-DDEEPMD_PREWARM_CUDA=OFF", "-DDEEPMD_PREWARM_NCCL=ON")
    assert done.returncode and "NCCL=ON needs DEEPMD_PREWARM_CUDA=ON" in words(done)
    for part in ("CUDA", "NCCL"):
        done = options(empty, f"-DDEEPMD_PREWARM_{part}=ON")
        assert done.returncode
        expected = f"DEEPMD_PREWARM_{part}=ON, but this is missing: a torch with CUDA"
        assert expected in words(done), words(done)
    done = options(empty)
    assert not done.returncode
    assert "CUDA part isn't built: missing: a torch with CUDA" in words(done)
    done = options(torch_lib, "-DDEEPMD_PREWARM_NCCL=OFF")
    assert not done.returncode
    assert "switched off by DEEPMD_PREWARM_NCCL=OFF" in words(done)
