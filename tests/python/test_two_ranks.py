# SPDX-License-Identifier: LGPL-3.0-or-later
"""Prewarming generic models on two gloo ranks (cases A1, A4-A7, B2, B7, B10, D6)."""

from __future__ import annotations

import pytest
from rank_pair import RankPair

LONG_TEXT = "the first line\n  zweite Zeile: Größe 3 Å\n" + "x" * 3000 + "\nthe end"


@pytest.fixture(scope="module")
def pair():
    ranks = RankPair()
    yield ranks
    assert ranks.close() == [0, 0]


@pytest.fixture(scope="module")
def six_tasks(pair):
    return pair.run("six_tasks")


def test_six_tasks_compile_before_step_1_and_train_like_eager_ones(six_tasks):
    for answer in six_tasks:
        assert answer["compiled_after_start"] == 0
        assert answer["own_after_start"] == 0
        assert answer["losses"] == pytest.approx(answer["expected"], rel=1e-5)
        assert answer["unchanged"] and answer["grads_none"]
        assert answer["sum"] == 3.0
        # No sample of an earlier task is alive when the next one starts.
        assert answer["alive_after"] == [0] * 6


def test_the_report_holds_every_rank_on_rank_0_and_tells_what_was_released(six_tasks):
    first, second = six_tasks
    report = first["report"]
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert report["ranks"][0]["pid"] != report["ranks"][1]["pid"]
    assert [r["rank"] for r in second["report"]["ranks"]] == [1]
    assert report["group_timeout_s"] == 1800.0
    assert report["compiled_after_start"] == 0
    assert report["wall_s"] > 0
    for rank in report["ranks"]:
        assert [t["name"] for t in rank["tasks"]] == [f"t{w}" for w in range(3, 9)]
        for task in rank["tasks"]:
            assert task["bytes_released"] == first["sample_bytes"][task["name"]]
            # Two shapes with dynamic=False: two graphs, each with a backward.
            assert (task["graphs_forward"], task["graphs_backward"]) == (2, 2)
            assert task["compile_s"] > 0
            assert task["rss_after"] > 0
            assert {"compile", "run", "release", "wait"} <= {
                span["kind"] for span in task["spans"]
            }
        sources = [task["source"] for task in rank["tasks"]]
        assert sources == ["compiled"] * 5 + ["shared"]


def test_random_streams_are_as_before_on_each_rank(pair):
    answers = pair.run("random_streams")
    for answer in answers:
        assert answer["after"] == answer["before"]
    assert answers[0]["before"] != answers[1]["before"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([["a", "b", "c"], ["a", "b"]], ["3 tasks", "2 tasks"]),
        ([["a", "b"], ["b", "a"]], ["task 1: a", "task 1: b"]),
    ],
)
def test_ranks_with_different_tasks_all_raise_the_difference(pair, names, words):
    first, second = pair.run("differing_tasks", names=names)
    assert first["text"] == second["text"]
    for answer in (first, second):
        assert answer["type"] == "RuntimeError"
        assert all(word in answer["text"] for word in words), answer["text"]
        assert answer["started"] == []
        assert answer["sum"] == 3.0


def test_an_empty_task_list_on_one_rank_is_raised_on_both(pair):
    first, second = pair.run("differing_tasks", names=[["a"], []])
    assert first["type"] == "RuntimeError" and second["type"] == "ValueError"
    assert "rank 1" in first["text"]
    assert "expected at least one task, got none" in first["text"]
    assert first["started"] == [] and first["sum"] == 3.0


def test_samples_that_fail_on_one_rank_end_prewarming_on_both(pair):
    first, second = pair.run("failing_samples")
    assert first["type"] == "RuntimeError" and second["type"] == "StopIteration"
    assert "rank 1" in first["text"] and "b" in first["text"]
    assert "StopIteration" in first["text"]
    # a is done, b was tried, c was never started; hooks saw the failed one too.
    assert first["after_task"] == second["after_task"] == ["a", "b"]
    assert first["sum"] == second["sum"] == 3.0


def test_a_compiler_error_keeps_its_type_and_other_tasks_stay_usable(pair):
    first, second = pair.run("failing_compiler")
    assert first["type"] == "RuntimeError"
    for word in ("rank 1", "bad", "CantSplit: ragged batch"):
        assert word in first["text"]
    assert "NotImplementedError" in second["trace"]
    assert second["type"] == "BackendCompilerFailed"
    assert "task 'bad'" in second["trace"]
    for answer in (first, second):
        assert answer["good"] == "shared"  # compiled by the call that failed
        assert answer["compiled_later"] == 0
        assert answer["sample_intact"] and answer["unchanged"]
        assert answer["sum"] == 3.0


@pytest.mark.parametrize("text", ["bad task", LONG_TEXT], ids=["short", "long"])
def test_an_error_reaches_the_other_rank_whole_and_soon(pair, text):
    first, second = pair.run("failing_call", text=text, kind="ValueError")
    assert first["type"] == "RuntimeError"
    assert "rank 1" in first["text"] and "bad task" in first["text"]
    for line in text.splitlines():
        assert line in first["text"]
    assert second["type"] == "ValueError"
    assert text in second["text"]
    assert "rank_cases.py" in second["trace"] and "raise kinds" in second["trace"]
    assert "task 'bad task' on rank 1" in second["trace"]
    assert first["sum"] == 3.0


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit", "MemoryError"])
def test_an_interrupt_passes_through_and_is_told_to_the_other_rank(pair, kind):
    first, second = pair.run("failing_call", text="stop", kind=kind)
    assert second["type"] == kind
    assert first["type"] == "RuntimeError" and kind in first["text"]
    assert first["sum"] == 3.0


def test_validation_and_training_through_ddp_compile_nothing_afterwards(pair):
    for answer in pair.run("validation_and_wrapping"):
        assert answer["in_training"] == 0
        assert answer["in_validation"] == 0
        assert answer["backwards"]["train"] >= 1
        assert answer["backwards"]["validate"] == 0
        assert answer["training"] is True
        assert answer["sum"] == 3.0


def test_a_static_graph_of_ddp_still_averages_its_gradients(pair):
    first, second = pair.run("static_graph")
    assert first["grads"] == second["grads"]


def test_a_rank_that_is_done_waits_for_one_that_is_not(pair):
    first, second = pair.run("late_rank")
    assert first == {"ranks": [0, 1], "complete": True}
    assert second == {"ranks": [1], "complete": False}


def test_a_missing_library_on_one_rank_degrades_both_with_one_warning(pair):
    first, second = pair.run("degraded", strict=False)
    for answer in (first, second):
        assert answer["type"] is None
        assert answer["degraded"] == ["rank 1: built for torch 9.9"]
        assert answer["sum"] == 3.0
    assert len(first["warnings"]) == 1 and second["warnings"] == []
    assert "rank 1: built for torch 9.9" in first["warnings"][0]


def test_a_missing_library_is_an_error_on_both_when_strict(pair):
    for answer in pair.run("degraded", strict=True):
        assert answer["type"] == "ImportError"
        assert "rank 1: built for torch 9.9" in answer["text"]


def test_a_group_of_one_waits_for_nobody(pair):
    for rank, answer in enumerate(pair.run("subgroups")):
        assert answer == {"alone": 1, "both": 2, "complete": rank == 0}


def test_heartbeats_say_which_task_is_compiled_and_that_training_began(pair):
    for answer in pair.run("phases"):
        assert answer["seen"] == ["compile water", "compile metal"]
        assert answer["sum"] == 3.0


@pytest.mark.parametrize("first", [True, False], ids=["rank 0 misses", "rank 0 hits"])
@pytest.mark.parametrize("second", [True, False], ids=["1 misses", "1 hits"])
def test_no_mix_of_compiled_and_found_graphs_needs_a_collective(pair, first, second):
    for answer, missed in zip(
        pair.run("mixes", misses=[first, second]), (first, second), strict=True
    ):
        assert answer["compiled"] is missed
        assert answer["source"] == ("compiled" if missed else "shared")
        assert answer["sum"] == 3.0


@pytest.mark.parametrize("late", [[], [0], [1]], ids=["burst", "0 late", "1 late"])
def test_a_collective_after_any_stagger_pairs_with_its_own(pair, late):
    for answer in pair.run("stagger", late=late):
        assert answer == {"ready": 2, "sum": 3.0}


@pytest.mark.parametrize("broken", [[], [1], [0, 1]], ids=["none", "1", "both"])
def test_a_cache_that_cannot_be_written_is_told_to_both_ranks(pair, broken):
    for rank, answer in enumerate(pair.run("broken_cache", broken=broken)):
        if broken:
            assert "NotADirectoryError" in answer["text"]
            assert "rank 1" in answer["text"] or rank in broken
            assert "rank 0 in" not in answer["text"] or 0 in broken
        else:
            assert answer["type"] is None
        assert answer["between"] == 3.0
        assert answer["later"] in {"compiled", "loaded"}  # from a whole cache
        assert answer["sum"] == 3.0


def test_communicators_connect_once_where_there_is_a_device(pair):
    for answer in pair.run("connected"):
        assert answer["without"] is False
        assert answer["with"] is True
        assert answer["calls"] == ["cpu", "synchronized"]
        assert answer["sum"] == 3.0
