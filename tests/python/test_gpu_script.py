# SPDX-License-Identifier: LGPL-3.0-or-later
"""tests/gpu/check.sh as far as a machine without a GPU can go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[1] / "gpu"


def run(
    *arguments: str, out: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": sys.executable, "WORK": str(out)}
    variables["OUT"] = str(out / "out")
    return subprocess.run(
        [str(GPU / "check.sh"), *arguments],
        env=variables | environment,
        cwd=out,  # from anywhere
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not os.access("/usr/local/cuda/bin/nvcc", os.X_OK), reason="nvcc")
def test_a_dry_run_lists_the_tests_and_builds_nothing(tmp_path):
    done = run("--dry-run", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "test_a_capture_goes_on_whatever_is_called_inside",
        "test_communicators_connect_before_the_first_collective",
        "test_memory_in_use_on_another_stream_is_not_handed_on[by us]",
        "test_training_compiles_nothing_more",
        "nothing was built or run",
    ):
        assert words in done.stdout, words
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
@pytest.mark.skipif(not os.access("/usr/local/cuda/bin/nvcc", os.X_OK), reason="nvcc")
def test_without_a_device_it_says_so_before_it_builds(tmp_path):
    done = run(out=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "check.sh: no CUDA device" in done.stderr
    assert not (tmp_path / "build").exists()


def test_a_wrong_argument_or_a_missing_tool_is_named(tmp_path):
    done = run("--fast", out=tmp_path)
    assert done.returncode == 2
    assert "expected --dry-run or nothing, got '--fast'" in done.stderr
    done = run("--dry-run", out=tmp_path, PYTHON="/nowhere/python")
    assert done.returncode == 2
    assert "no Python at '/nowhere/python'" in done.stderr


def test_the_table_has_a_line_for_each_test(tmp_path):
    file = tmp_path / "gpu.json"
    tests = {
        "test_memory.py::test_free_blocks_go_back": {
            "outcome": "passed",
            "seconds": 1.5,
            "figures": {"freed_MB": 256},
        },
        "test_capture.py::test_a_capture": {"outcome": "failed", "seconds": 0.2},
    }
    file.write_text(json.dumps({"machine": {"device": "H200"}, "tests": tests}))
    command = [sys.executable, str(GPU / "table.py")]
    printed = subprocess.run(
        [*command, str(file)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert printed == [
        "device H200",
        "passed     1.50 s  free blocks go back  [freed_MB 256]",
        "failed     0.20 s  a capture",
        "1 failed, 1 passed",
    ]
    file.unlink()
    printed = subprocess.run(
        [*command, str(file)], capture_output=True, text=True, check=True
    ).stdout
    assert "no test ran" in printed
