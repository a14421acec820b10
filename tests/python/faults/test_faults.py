# SPDX-License-Identifier: LGPL-3.0-or-later
"""Eight faults with real processes and signals; each names what survivors raise.

Beats are five times faster than by default, so a stop is found within 1.2 s.
"""

from __future__ import annotations

import signal

import pytest
from rank_entry import GROUP_TIMEOUT_S
from rank_job import Fault, run_fault

# Real time-outs: they need a machine that does nothing else.
pytestmark = pytest.mark.faults

QUICK = {"DP_PREWARM_BEAT_S": "0.2", "DP_PREWARM_DEAD_S": "1"}


def test_a_killed_rank_is_named_by_every_survivor_at_once() -> None:
    outcome = run_fault(Fault(signals={1: signal.SIGKILL}), "waiting")
    assert "1 of 3 ranks failed" in outcome.text
    assert 'rank 1 in "compile b"' in outcome.text
    assert "its process ended" in outcome.text
    assert outcome.seconds(0) < 3
    assert outcome.exit_codes == [0, -signal.SIGKILL, 0]


def test_a_stopped_rank_is_named_and_raises_the_same_when_it_wakes() -> None:
    outcome = run_fault(
        Fault(signals={1: signal.SIGSTOP}),
        "waiting",
        environment=QUICK,
        speaking_victims=(1,),
    )
    assert 'rank 1 in "compile b"' in outcome.text
    assert "no heartbeat for 1" in outcome.text
    assert outcome.victims[1].words == ("raised", "RuntimeError", outcome.text)
    assert outcome.exit_codes == [0, 0, 0]


def test_an_exception_in_compile_is_raised_on_all_with_task_and_text() -> None:
    outcome = run_fault(
        Fault(orders={1: "raise bad täsk\nsecond line"}, prewarm=True),
        "waiting",
        speaking_victims=(1,),
    )
    assert 'rank 1 in "b"' in outcome.text
    assert "ValueError: bad täsk\n    second line" in outcome.text
    assert outcome.victims[1].words[1] == "ValueError"
    assert outcome.victims[1].words[2].startswith("bad täsk\nsecond line")


def test_an_exception_in_the_sample_provider_is_raised_on_all() -> None:
    outcome = run_fault(
        Fault(orders={1: "sample provider"}, prewarm=True),
        "compiling",
        speaking_victims=(1,),
    )
    assert 'rank 1 in "b"' in outcome.text
    assert "no frame in set.000" in outcome.text


def test_a_rank_that_holds_the_gil_for_twenty_beats_lives() -> None:
    outcome = run_fault(
        Fault(orders={1: "gil 4"}), "waiting", environment=QUICK, speaking_victims=(1,)
    )
    assert {said.words[0] for said in outcome.survivors.values()} == {"passed"}
    assert outcome.victims[1].words == ("passed",)
    assert outcome.seconds(0) > 3.9


def test_a_rank_that_sleeps_three_group_timeouts_lives() -> None:
    outcome = run_fault(
        Fault(orders={1: f"sleep {3 * GROUP_TIMEOUT_S}"}),
        "waiting",
        speaking_victims=(1,),
    )
    assert {said.words[0] for said in outcome.survivors.values()} == {"passed"}
    assert outcome.victims[1].words == ("passed",)


def test_the_death_of_the_leader_is_named_by_every_survivor() -> None:
    outcome = run_fault(Fault(signals={0: signal.SIGKILL}), "waiting")
    assert 'rank 0 in "compile b"' in outcome.text
    assert "its process ended" in outcome.text
    assert outcome.seconds(1) < 3


def test_different_task_lists_are_an_error_on_every_rank() -> None:
    outcome = run_fault(
        Fault(orders={1: "different tasks"}), "waiting", speaking_victims=(1,)
    )
    assert "the ranks do not agree on what they are doing" in outcome.text
    assert 'differs from rank 0: "2 tasks" against "3 tasks"' in outcome.text
    assert outcome.victims[1].words == ("raised", "RuntimeError", outcome.text)
