# SPDX-License-Identifier: LGPL-3.0-or-later
"""The crash of deepmd-kit PR #5449: what it is in torch, and that we do not add to it.

Each case runs in a process of its own, which may die. See view_meta.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("view_meta.py")
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
#: as measured; of the releases between nothing is claimed
BROKEN = _VERSION == (2, 11)
MENDED = _VERSION >= (2, 15)


def run(*arguments: str, cache: Path | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MALLOC_PERTURB_": "165",
            **({"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache else {}),
        },
    )
    return done.returncode, done.stdout + done.stderr


def test_torch_2_11_pickles_freed_memory_as_sizes_of_a_view_and_2_15_does_not() -> None:
    code, text = run("tuple")
    right = code == 0 and "[2, 3, 4]" in text
    assert right or code == -signal.SIGSEGV or (code == 0 and "4]" in text), text
    if BROKEN:
        assert not right
    if MENDED:
        assert right, text


def test_a_dropped_traced_graph_and_gc_at_every_allocation_do_no_harm() -> None:
    code, text = run("collect", "1")
    assert (code, text.splitlines()[-1:]) == (0, ["done"]), text[-2000:]


@pytest.mark.faults
def test_a_graph_from_the_compile_cache_replays_views_of_garbage_on_torch_2_11(
    tmp_path: Path,
) -> None:
    code, text = run("cache", cache=tmp_path)
    if BROKEN:
        assert code == -signal.SIGSEGV or "apply_view_meta_sequence" in text, text
    if MENDED:
        assert code == 0, text


@pytest.mark.faults
@pytest.mark.parametrize(("backend", "count"), [("aot_eager", "12"), ("inductor", "4")])
def test_many_dropped_graphs_do_no_harm(
    backend: str, count: str, tmp_path: Path
) -> None:
    code, text = run("collect", count, backend, cache=tmp_path)
    assert (code, text.splitlines()[-1:]) == (0, ["done"]), text[-2000:]
