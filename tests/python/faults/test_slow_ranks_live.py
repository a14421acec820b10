# SPDX-License-Identifier: LGPL-3.0-or-later
"""Two ranks that look dead to every watchdog but ours, and are waited for."""

from __future__ import annotations

from rank_entry import GROUP_TIMEOUT_S
from rank_job import Fault, Outcome, run_fault


def _everybody_passed(outcome: Outcome) -> None:
    assert {said.words[0] for said in outcome.survivors.values()} == {"passed"}
    assert outcome.victims[1].words == ("passed",)


def test_a_rank_that_holds_the_gil_for_20_s_lives() -> None:
    outcome = run_fault(Fault(orders={1: "gil 20"}), "waiting", speaking_victims=(1,))
    _everybody_passed(outcome)
    assert outcome.seconds(0) > 19


def test_a_rank_that_sleeps_for_three_group_timeouts_lives() -> None:
    outcome = run_fault(
        Fault(orders={1: f"sleep {3 * GROUP_TIMEOUT_S}"}),
        "waiting",
        speaking_victims=(1,),
    )
    _everybody_passed(outcome)
    assert outcome.seconds(0) > 3 * GROUP_TIMEOUT_S - 0.5
