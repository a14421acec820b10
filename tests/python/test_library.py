# SPDX-License-Identifier: LGPL-3.0-or-later
"""Finding, checking and loading the operator library."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import deepmd_prewarm
import pytest
import torch
from deepmd_prewarm import _library
from fresh_process import output
from library_copies import needs_deepmd_kit

LIBRARY = deepmd_prewarm.library_path()
RELEASE = str(torch.__version__).split("+")[0]
OPERATORS = (
    "release_trace_inputs",
    "explain_release",
    "warmup_compiled",
    "safe_empty_cache",
    "cache_bytes",
    "sync_ranks",
    "scalarize_losses",
    "prewarm_library",
)
LOAD = f"""
import deepmd_prewarm, torch
try:
    deepmd_prewarm.load()
except ImportError as error:
    print(error)
print([n for n in {OPERATORS!r} if hasattr(torch.ops.deepmd, n)])
"""


def stub(folder: Path, *, version: str, torch: str, body: str = "") -> Path:
    """Build a library that only has a stamp, and what `body` adds."""
    source = folder / "stub.cpp"
    source.write_text(
        f"""
        extern "C" const char deepmd_prewarm_stamp[] =
            "deepmd_prewarm version={version} torch={torch} cxx11_abi=1";
        {body}
        """
    )
    target = folder / "libdeepmd_prewarm.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", str(target), str(source)], check=True
    )
    return target


def test_import_loads_neither_torch_nor_the_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import deepmd_prewarm\n"
        "new = set(sys.modules) - before\n"
        "print([m for m in new if m.split('.')[0] in ('torch', 'numpy', 'pydantic')"
        " or m.startswith('deepmd_prewarm.')])\n"
        "print(any('libdeepmd_prewarm' in l for l in open('/proc/self/maps')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "False"]


def test_every_public_name_is_listed_and_found() -> None:
    for name in deepmd_prewarm.__all__:
        assert name in dir(deepmd_prewarm)
        assert getattr(deepmd_prewarm, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'prewam'"):
        deepmd_prewarm.prewam  # noqa: B018


def test_prewarm_stays_the_function_when_its_module_is_imported() -> None:
    code = (
        "import deepmd_prewarm.prewarm, deepmd_prewarm\n"
        "from deepmd_prewarm import prewarm\n"
        "print(callable(deepmd_prewarm.prewarm), callable(prewarm))"
    )
    assert output(code) == "True True"


def test_loading_registers_every_operator_and_says_which_file_serves() -> None:
    code = (
        "import deepmd_prewarm, torch; path = deepmd_prewarm.load()\n"
        "assert path == deepmd_prewarm.load()\n"
        f"assert all(hasattr(torch.ops.deepmd, n) for n in {OPERATORS!r})\n"
        "assert not hasattr(torch.ops.deepmd, 'enable_mpi')\n"
        "print(path, *torch.ops.deepmd.prewarm_library())"
    )
    expected = [LIBRARY, deepmd_prewarm.__version__, RELEASE, LIBRARY]
    assert output(code).split() == [str(part) for part in expected]


def test_a_missing_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    lines = output(LOAD, DP_PREWARM_LIBRARY=tmp_path / "absent.so").splitlines()
    assert "expected the operator library at" in lines[0]
    assert "absent.so" in lines[0] and "DP_PREWARM_LIBRARY" in lines[0]
    assert lines[-1] == "[]"


@pytest.mark.parametrize("content", [b"", b"no library at all"])
def test_a_file_that_is_no_library_is_refused_by_name(
    tmp_path: Path, content: bytes
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(content)
    with pytest.raises(ImportError, match=r"broken\.so, got a file without its ver"):
        _library.read_stamp(broken)


def test_a_truncated_library_is_an_import_error_and_registers_nothing(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "truncated.so"
    data = LIBRARY.read_bytes()
    broken.write_bytes(data[: data.index(b"deepmd_prewarm version=") + 200])
    lines = output(LOAD, DP_PREWARM_LIBRARY=broken).splitlines()
    assert str(broken) in lines[0] and "pip install" in lines[0]
    assert lines[-1] == "[]"


def test_a_library_for_another_torch_is_refused_before_it_runs(
    tmp_path: Path,
) -> None:
    library = stub(
        tmp_path,
        version=deepmd_prewarm.__version__,
        torch="2.9.1",
        body="__attribute__((constructor)) static void end() { __builtin_trap(); }",
    )
    lines = output(LOAD, DP_PREWARM_LIBRARY=library).splitlines()
    assert f"expected a library built for torch {RELEASE}" in lines[0]
    assert f"got {library} built for torch 2.9.1" in lines[0]
    assert "pip install" in lines[0]
    assert lines[-1] == "[]"


def test_a_library_of_another_cxx_abi_is_refused(tmp_path: Path) -> None:
    stamp = _library.Stamp(deepmd_prewarm.__version__, RELEASE, "0")
    with pytest.raises(ImportError, match=r"\(C\+\+11 ABI 1\), got .*ABI 0\)"):
        _library._check_stamp(tmp_path, stamp)


def test_a_patch_release_of_the_same_torch_is_accepted(tmp_path: Path) -> None:
    series = ".".join(RELEASE.split(".")[:2])
    stamp = _library.Stamp(deepmd_prewarm.__version__, f"{series}.77", "1")
    _library._check_stamp(tmp_path, stamp)


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    stamp = _library.Stamp("9.9.9", RELEASE, "1")
    ours = deepmd_prewarm.__version__
    with pytest.raises(ImportError, match=f"expected version {ours}.*got version 9.9"):
        _library._check_stamp(tmp_path, stamp)


def test_a_missing_symbol_is_named_with_both_torch_versions(tmp_path: Path) -> None:
    library = stub(
        tmp_path,
        version=deepmd_prewarm.__version__,
        torch=RELEASE,
        body="namespace c10 { void moved_away(); }"
        'extern "C" void call() { c10::moved_away(); }',
    )
    lines = output(LOAD, DP_PREWARM_LIBRARY=library).splitlines()
    assert "undefined symbol: _ZN3c1010moved_awayEv" in lines[0]
    assert f"to load into torch {torch.__version__}" in lines[0]
    assert f"It was built for torch {RELEASE}" in lines[0]
    assert lines[-1] == "[]"


def test_a_taken_operator_name_leaves_nothing_half_registered() -> None:
    taken = (
        "import torch\n"
        "other = torch.library.Library('deepmd', 'FRAGMENT')\n"
        "other.define('scalarize_losses(int x) -> int')\n"
    )
    lines = output(taken + LOAD).splitlines()
    assert "to register its operators, got" in lines[0]
    assert "deepmd::scalarize_losses" in "".join(lines)
    assert lines[-1] == "['scalarize_losses']"


def test_plain_import_and_torch_go_on_without_a_library(tmp_path: Path) -> None:
    code = (
        "import deepmd_prewarm, torch\n"
        "try:\n    deepmd_prewarm.release_trace_inputs\n"
        "except ImportError as error:\n    print(type(error).__name__)\n"
        "print(torch.ones(2).sum().item())"
    )
    result = output(code, DP_PREWARM_LIBRARY=tmp_path / "absent.so")
    assert result.split() == ["ImportError", "2.0"]


def test_the_distribution_names_its_torch_and_carries_none() -> None:
    series = ".".join(RELEASE.split(".")[:2])
    assert f"torch=={series}.*" in (requires("deepmd-prewarm") or [])
    carried = {path.name for path in LIBRARY.parent.glob("*.so*")}
    # The second one only where this was built beside a torch with CUDA.
    assert carried - {"libdeepmd_prewarm_cuda.so"} == {LIBRARY.name}


@pytest.mark.parametrize("first", ["plugin", "deepmd"])
def test_it_loads_before_and_after_deepmd_kits_library(first: str) -> None:
    needs_deepmd_kit()
    code = f"""
import torch, pathlib, importlib.util, ctypes, sys
root = pathlib.Path(importlib.util.find_spec("deepmd").origin).parent
def deepmd():
    ctypes.CDLL(sys.prefix + "/lib/libmpi.so.12", mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(root / "lib" / "libdeepmd_op_pt.so"))
def plugin():
    import deepmd_prewarm; deepmd_prewarm.load()
    print(hasattr(torch.ops.deepmd, "enable_mpi"))
order = [plugin, deepmd] if {first!r} == "plugin" else [deepmd, plugin]
for step in order: step()
print(torch.ops.deepmd.cache_bytes(torch.device("cpu")))
print(torch.ops.deepmd.enable_mpi())
"""
    lines = output(code).splitlines()
    assert lines[0] == str(first == "deepmd")
    assert lines[1] == "(0, 0)"
    assert lines[2].startswith("tensor(")
