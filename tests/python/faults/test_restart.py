# SPDX-License-Identifier: LGPL-3.0-or-later
"""Field case D3: torchrun starts the job again, over a Store with old keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.mark.parametrize("moment", ["compiling", "waiting", "after"])
def test_a_second_attempt_sees_nothing_of_the_first(moment: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d"),
            *("--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.5"),
            str(Path(__file__).with_name("restarted_rank.py")),
            moment,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"attempt \d rank \d: .*", done.stdout))
    assert said[-2:] == ["attempt 1 rank 0: passed", "attempt 1 rank 1: passed"]
    # The old error was in the Store, and told to who could still hear it.
    if moment != "after":
        assert any("attempt 0 rank 1: ValueError('an error of" in s for s in said)
