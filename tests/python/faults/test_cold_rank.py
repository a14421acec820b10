# SPDX-License-Identifier: LGPL-3.0-or-later
"""Field case B1: one rank compiles for twice the time-out of the group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

BENCH = Path(__file__).parents[2] / "bench" / "bench_seed_case.py"


def test_the_job_lives_with_prewarming_and_is_killed_without() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--timeout", "5", "--delay", "10"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    control, prewarmed = done.stdout.splitlines()[1:3]
    assert control.startswith("control") and "exit codes [0, 0]" not in control
    assert "exit codes [0, 0]" in prewarmed
    assert "compiled after step 1: 0" in prewarmed
