# SPDX-License-Identifier: LGPL-3.0-or-later
"""Random webs of tensors: what somebody can read stays, what nobody can goes.

The webs run in a process of their own: a crash is an exit code, not the end of
the test run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("release_webs.py")


def run_webs(number: int, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, str(number), str(seed)],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    # The end of the log holds the smallest web that fails, step by step.
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-6000:]}"
    assert done.stdout == f"{number} webs\n"


def test_three_hundred_webs_behave_like_their_model():
    run_webs(300, seed=0)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(1, 6))
def test_ten_thousand_webs_behave_like_their_model(seed):
    run_webs(2000, seed)
