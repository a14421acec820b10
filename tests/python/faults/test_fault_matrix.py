# SPDX-License-Identifier: LGPL-3.0-or-later
"""Every fault while the others compile, while they wait, just after a verdict.

Default heartbeats (1 s, dead after 5). A restart by torchrun has its own test.
"""

from __future__ import annotations

import signal

import pytest
from rank_entry import GROUP_TIMEOUT_S
from rank_job import Fault, Outcome, run_fault

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

MOMENTS = ["compiling", "waiting", "after"]


def _all_passed(outcome: Outcome) -> None:
    assert {said.words[0] for said in outcome.survivors.values()} == {"passed"}


def _names(outcome: Outcome, *parts: str, within_s: float) -> None:
    """Every survivor raised one text that holds all parts, in time."""
    assert all(said.words[0] == "raised" for said in outcome.survivors.values())
    for part in parts:
        assert part in outcome.text, outcome.text
    first = min(outcome.seconds(rank) for rank in outcome.survivors)
    assert first < within_s, (first, outcome)


@pytest.mark.parametrize("moment", MOMENTS)
class TestEveryRankAgreesThat:
    def test_a_killed_process_ended(self, moment: str) -> None:
        outcome = run_fault(Fault(signals={1: signal.SIGKILL}), moment)
        _names(outcome, 'rank 1 in "', "its process ended", within_s=3)

    def test_a_stopped_process_is_silent(self, moment: str) -> None:
        outcome = run_fault(
            Fault(signals={1: signal.SIGSTOP}), moment, speaking_victims=(1,)
        )
        _names(outcome, 'rank 1 in "', "no heartbeat for", within_s=8.5)
        assert outcome.victims[1].words[-1] == outcome.text

    def test_a_segfault_ended_a_process(self, moment: str) -> None:
        fault = (
            Fault(signals={1: signal.SIGSEGV})
            if moment == "waiting"
            else Fault(orders={1: "segfault"})
        )
        outcome = run_fault(fault, moment)
        _names(outcome, 'rank 1 in "', "its process ended", within_s=3)

    def test_an_exit_in_mid_phase_ended_a_process(self, moment: str) -> None:
        outcome = run_fault(Fault(orders={1: "exit 3"}), moment)
        _names(outcome, 'rank 1 in "', "its process ended", within_s=3)
        assert outcome.exit_codes[1] == 3

    def test_an_exception_in_compile_was_raised(self, moment: str) -> None:
        outcome = run_fault(
            Fault(orders={1: "raise bad task"}, prewarm=moment != "after"),
            moment,
            speaking_victims=(1,),
        )
        _names(outcome, "rank 1 in ", "ValueError: bad task", within_s=3)
        assert outcome.victims[1].words[1] == "ValueError"

    def test_the_sample_provider_failed(self, moment: str) -> None:
        if moment == "after":
            pytest.skip("the provider of a task runs in that task's phase")
        outcome = run_fault(
            Fault(orders={1: "sample provider"}, prewarm=True),
            moment,
            speaking_victims=(1,),
        )
        _names(outcome, 'rank 1 in "b"', "no frame in set.000", within_s=3)

    def test_memory_ran_out(self, moment: str) -> None:
        outcome = run_fault(Fault(orders={1: "memory"}), moment, speaking_victims=(1,))
        _names(outcome, "MemoryError: cannot allocate 1.5 TiB", within_s=3)
        assert outcome.victims[1].words[1] == "MemoryError"

    def test_a_rank_without_the_gil_for_20_s_lives(self, moment: str) -> None:
        outcome = run_fault(Fault(orders={1: "gil 20"}), moment, speaking_victims=(1,))
        _all_passed(outcome)

    def test_a_sleep_of_three_group_timeouts_is_no_death(self, moment: str) -> None:
        outcome = run_fault(
            Fault(orders={1: f"sleep {3 * GROUP_TIMEOUT_S}"}),
            moment,
            speaking_victims=(1,),
        )
        _all_passed(outcome)

    def test_the_leader_died(self, moment: str) -> None:
        outcome = run_fault(Fault(signals={0: signal.SIGKILL}), moment)
        _names(outcome, 'rank 0 in "', "its process ended", within_s=3)

    def test_task_lists_differ(self, moment: str) -> None:
        outcome = run_fault(
            Fault(orders={1: "different tasks"}), moment, speaking_victims=(1,)
        )
        _names(outcome, "do not agree", '"2 tasks" against "3 tasks"', within_s=3)
        assert outcome.victims[1].words[-1] == outcome.text

    def test_two_ranks_failed_at_once(self, moment: str) -> None:
        outcome = run_fault(
            Fault(orders={1: "raise first", 2: "raise second"}),
            moment,
            world=4,
            speaking_victims=(1, 2),
        )
        _names(
            outcome,
            "2 of 4 ranks failed",
            "ValueError: first",
            "ValueError: second",
            within_s=3,
        )

    def test_one_failed_while_another_is_dead(self, moment: str) -> None:
        outcome = run_fault(
            Fault(orders={1: "raise bad task"}, signals={2: signal.SIGKILL}),
            moment,
            world=4,
            speaking_victims=(1,),
        )
        _names(
            outcome,
            "2 of 4 ranks failed",
            "ValueError: bad task",
            "its process ended",
            within_s=3,
        )

    def test_somebody_pressed_ctrl_c(self, moment: str) -> None:
        outcome = run_fault(
            Fault(signals={1: signal.SIGINT}), moment, speaking_victims=(1,)
        )
        _names(outcome, "rank 1 in ", within_s=3)
        assert "KeyboardInterrupt" in outcome.text or "Ctrl-C" in outcome.text
        assert outcome.victims[1].words[1] == "KeyboardInterrupt"

    def test_the_host_of_the_store_died(self, moment: str) -> None:
        outcome = run_fault(Fault(store_dies=True), moment)
        for rank, said in outcome.survivors.items():
            assert said.words[0] == "raised"
            assert "the Store of this group must answer" in said.words[-1]
            assert f"(rank {rank} in " in said.words[-1]
        assert outcome.seconds(0) < 3
