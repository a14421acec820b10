# SPDX-License-Identifier: LGPL-3.0-or-later
"""Six faults with real processes and signals; each names what survivors raise.

Nothing here is timed, the words tell how a fault was found: "its process ended"
by a neighbour, "no heartbeat" by the clock. Times are measured in `tests/bench`.
"""

from __future__ import annotations

import signal

from rank_job import Fault, run_fault


def test_a_killed_rank_is_named_by_every_survivor() -> None:
    outcome = run_fault(Fault(signals={1: signal.SIGKILL}), "waiting")
    assert "1 of 3 ranks failed" in outcome.text
    assert 'rank 1 in "compile b"' in outcome.text
    assert "its process ended" in outcome.text
    assert outcome.exit_codes == [0, -signal.SIGKILL, 0]


def test_a_stopped_rank_is_named_and_raises_the_same_when_it_wakes() -> None:
    outcome = run_fault(
        Fault(signals={1: signal.SIGSTOP}), "waiting", speaking_victims=(1,)
    )
    assert "1 of 3 ranks failed" in outcome.text
    assert 'rank 1 in "compile b"' in outcome.text
    assert "no heartbeat for" in outcome.text
    assert outcome.victims[1].words == ("raised", "RuntimeError", outcome.text)
    assert outcome.exit_codes == [0, 0, 0]


def test_an_exception_in_compile_is_raised_on_all_with_task_and_text() -> None:
    outcome = run_fault(
        Fault(orders={1: "raise bad täsk\nsecond line"}, prewarm=True),
        "waiting",
        speaking_victims=(1,),
    )
    assert "1 of 3 ranks failed" in outcome.text
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


def test_the_death_of_the_leader_is_named_by_every_survivor() -> None:
    outcome = run_fault(Fault(signals={0: signal.SIGKILL}), "waiting")
    assert 'rank 0 in "compile b"' in outcome.text
    assert "its process ended" in outcome.text
    assert outcome.exit_codes == [-signal.SIGKILL, 0, 0]


def test_different_task_lists_are_an_error_on_every_rank() -> None:
    outcome = run_fault(
        Fault(orders={1: "different tasks"}), "waiting", speaking_victims=(1,)
    )
    assert "the ranks do not agree on what they are doing" in outcome.text
    assert 'differs from rank 0: "2 tasks" against "3 tasks"' in outcome.text
    assert outcome.victims[1].words == ("raised", "RuntimeError", outcome.text)
