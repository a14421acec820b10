# SPDX-License-Identifier: LGPL-3.0-or-later
"""Ten minutes on a machine whose cores are all busy: nobody is called dead."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from rank_job import Fault, run_fault

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

SECONDS = float(os.environ.get("DP_TEST_BUSY_S", "600"))


def test_four_spinning_processes_make_no_rank_look_dead() -> None:
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)
    ]
    try:
        outcome = run_fault(
            Fault(orders={1: f"sleep {SECONDS}"}),
            "waiting",
            speaking_victims=(1,),
            patience_s=SECONDS + 120,
        )
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert {said.words for said in outcome.survivors.values()} == {("passed",)}
    assert outcome.victims[1].words == ("passed",)
    assert outcome.seconds(0) > SECONDS - 1
