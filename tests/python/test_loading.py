# SPDX-License-Identifier: LGPL-3.0-or-later
"""More than one copy of the library in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_process import output, run
from library_copies import (
    LIBRARY,
    OTHER_VERSION,
    VERSION,
    built,
    make_copies,
    needs_deepmd_kit,
)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_copies(tmp_path_factory.mktemp("copies"))


# Counts registrations, and uses both the operators and the bridge afterwards.
CHECK = """
def check(first):
    names = [name for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("deepmd::warmup_compiled")]
    assert sorted(names) == ["deepmd::warmup_compiled", "deepmd::warmup_compiled.list"]
    assert torch.ops.deepmd.prewarm_library()[2] == first
    ran = []
    def fn(x):
        ran.append(1)
        return x @ x
    task = deepmd_prewarm.CompiledTask.from_callable("task", fn)
    x = torch.ones(4, 4)
    deepmd_prewarm.warmup_compiled(task, [x])
    assert ran == [1] and task.is_warm()
    assert torch.ops.deepmd.release_trace_inputs([torch.ones(4, 4)]) == 64
    print("fine")
"""


@pytest.mark.parametrize("second", ["same", "link", "copy"])
@pytest.mark.parametrize("shims", ["before", "between", "after"])
def test_a_second_copy_stands_aside(
    second: str, shims: str, copies: dict[str, Path]
) -> None:
    steps = [f"torch.ops.load_library({str(p)!r})" for p in (copies[second], LIBRARY)]
    steps.insert(
        {"before": 0, "between": 1, "after": 2}[shims], "deepmd_prewarm.load()"
    )
    # torch.ops.load_library follows links.
    first = LIBRARY if shims == "before" else copies[second].resolve()
    code = ["import torch, deepmd_prewarm", CHECK, *steps, f"check({str(first)!r})"]
    done = run("\n".join(code))
    assert done.stdout.strip() == "fine", done.stderr
    assert "Warning" not in done.stderr


def test_the_build_tree_and_the_installed_file_live_together() -> None:
    tree = built("lib")
    assert not tree.samefile(LIBRARY)
    code = (
        f"import torch, deepmd_prewarm\n{CHECK}\n"
        f"torch.ops.load_library({str(tree)!r})\n"
        f"torch.ops.load_library({str(LIBRARY)!r})\n"
        f"check({str(tree)!r})"
    )
    assert output(code) == "fine"


def test_threads_that_load_at_once_get_one_registration(
    copies: dict[str, Path],
) -> None:
    code = f"""
import threading, torch, deepmd_prewarm
{CHECK}
start = threading.Barrier(4)
errors = []
def attempt(step):
    start.wait()
    try:
        step()
    except BaseException as error:
        errors.append(error)
copies = [{str(copies["copy"])!r}, {str(LIBRARY)!r}, {str(copies["link"])!r}]
steps = [lambda path=path: torch.ops.load_library(path) for path in copies]
threads = [threading.Thread(target=attempt, args=(step,))
           for step in [*steps, deepmd_prewarm.load]]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert errors == [], errors
check(torch.ops.deepmd.prewarm_library()[2])
"""
    assert output(code) == "fine"


@pytest.mark.parametrize("order", ["other first", "other second"])
def test_copies_of_two_versions_are_an_error_that_names_both(
    order: str, copies: dict[str, Path]
) -> None:
    paths = [copies["other"], LIBRARY]
    if order == "other second":
        paths.reverse()
    code = f"""
import ctypes, torch
for path in {[str(path) for path in paths]!r}:
    torch.ops.load_library(path)
library = ctypes.CDLL(path)
library.deepmd_prewarm_load_error.restype = ctypes.c_char_p
print(library.deepmd_prewarm_load_error().decode())
# The first one serves on.
print(torch.ops.deepmd.release_trace_inputs([torch.ones(4, 4)]))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    error, released = done.stdout.splitlines()
    assert "expected one version in a process" in error
    for path, version in ((LIBRARY, VERSION), (copies["other"], OTHER_VERSION)):
        assert f"{version} for torch" in error and str(path) in error
    assert released == "64"
    # A bare dlopen has nobody to ask: it warns with the same words.
    assert "expected one version in a process" in done.stderr


@pytest.mark.parametrize("where", ["loaded before", "loaded by us"])
def test_a_package_and_a_library_of_two_versions_are_an_error_that_names_both(
    where: str, copies: dict[str, Path]
) -> None:
    other = str(copies["other"])
    before = f"torch.ops.load_library({other!r})" if where == "loaded before" else ""
    code = f"""
import torch, deepmd_prewarm
{before}
try:
    deepmd_prewarm.load()
except ImportError as error:
    print(error)
"""
    text = output(code, **({} if before else {"DP_PREWARM_LIBRARY": other}))
    assert f"expected version {VERSION}" in text
    assert f"got version {OTHER_VERSION}" in text and other in text


@pytest.mark.parametrize("first", ["deepmd", "copy"])
def test_two_copies_and_deepmd_kits_library_live_together(
    first: str, copies: dict[str, Path]
) -> None:
    needs_deepmd_kit()
    code = f"""
import torch, pathlib, importlib.util, ctypes, sys, deepmd_prewarm
{CHECK}
root = pathlib.Path(importlib.util.find_spec("deepmd").origin).parent
def deepmd():
    ctypes.CDLL(sys.prefix + "/lib/libmpi.so.12", mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(root / "lib" / "libdeepmd_op_pt.so"))
def copy():
    torch.ops.load_library({str(copies["copy"])!r})
def installed():
    torch.ops.load_library({str(LIBRARY)!r})
for step in ([deepmd, copy] if {first!r} == "deepmd" else [copy, deepmd]): step()
installed()
check({str(copies["copy"])!r})
print(torch.ops.deepmd.enable_mpi())
"""
    lines = output(code).splitlines()
    assert lines[0] == "fine" and lines[1].startswith("tensor(")
