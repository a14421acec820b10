# SPDX-License-Identifier: LGPL-3.0-or-later
"""prewarm.json's keys, the table, the picture, and what bad files say."""

from __future__ import annotations

import io
import json
import time

import pytest
from deepmd_prewarm.report import PrewarmReport, RankRecord, Span, TaskRecord
from deepmd_prewarm.report_plot import draw
from deepmd_prewarm.report_table import print_report
from rich.console import Console

# The contract, word for word.
REPORT_KEYS = {
    "version",
    "world_size",
    "wall_s",
    "group_timeout_s",
    "compiled_after_start",
    "ranks",
}
RANK_KEYS = {"rank", "host", "pid", "tasks"}
TASK_KEYS = {
    "name",
    "mode",
    "graph",
    "source",
    "trace_s",
    "compile_s",
    "load_s",
    "wait_s",
    "cache_hits",
    "cache_misses",
    "bytes_released",
    "rss_before",
    "rss_after",
    "device_before",
    "device_after",
}


def a_task(name: str, start: float, **changes: object) -> TaskRecord:
    content = {
        "name": name,
        "trace_s": 1.0,
        "compile_s": 7.0,
        "wait_s": 0.5,
        "cache_misses": 2,
        "bytes_released": 2_500_000,
        "rss_before": 600_000_000,
        "rss_after": 604_000_000,
        "graphs_forward": 1,
        "graphs_backward": 1,
        "spans": [
            Span(kind="trace", start_s=start, end_s=start + 1),
            Span(kind="compile", start_s=start + 1, end_s=start + 8),
            Span(kind="wait", start_s=start + 8, end_s=start + 8.5),
        ],
    }
    return TaskRecord.model_validate({**content, **changes})


def a_report(world_size: int = 2, **changes: object) -> PrewarmReport:
    content: dict[str, object] = {
        "version": "0.1.0",
        "world_size": world_size,
        "wall_s": 17.0,
        "group_timeout_s": 1800.0,
        "compiled_after_start": 0,
        "ranks": [
            RankRecord(
                rank=rank,
                host="node",
                pid=100 + rank,
                tasks=[a_task("Cu", 0.0), a_task("[red]Ni", 8.5, source="shared")],
            )
            for rank in range(world_size)
        ],
    }
    return PrewarmReport.model_validate({**content, **changes})


def rendered(report: PrewarmReport, width: int = 200) -> str:
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=width))
    return stream.getvalue()


def test_saved_json_has_every_key_of_the_contract(tmp_path):
    path = a_report().save(tmp_path / "new" / "prewarm.json")
    saved = json.loads(path.read_text())
    assert set(saved) >= REPORT_KEYS
    for rank in saved["ranks"]:
        assert set(rank) >= RANK_KEYS
        for task in rank["tasks"]:
            assert set(task) >= TASK_KEYS
    assert saved["ranks"][1]["tasks"][1]["source"] == "shared"
    assert [p.name for p in path.parent.iterdir()] == ["prewarm.json"]


def test_loading_gives_back_what_was_saved_and_keys_of_a_newer_version(tmp_path):
    report = a_report()
    path = report.save(tmp_path / "prewarm.json")
    assert PrewarmReport.load(tmp_path) == report
    newer = json.loads(path.read_text())
    newer["ranks"][0]["tasks"][0]["invented_later"] = 7
    path.write_text(json.dumps(newer))
    again = PrewarmReport.load(path).save(tmp_path / "again.json")
    kept = json.loads(again.read_text())["ranks"][0]["tasks"][0]
    assert kept["invented_later"] == 7


def test_a_missing_report_says_how_to_make_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*--report DIR"):
        PrewarmReport.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "JSON"),
        ("[]", "got '.*x.json'"),
        ('{"version": "1"}', "world_size"),
        ('{"version": "1", "world_size": 1, "ranks": [{"rank": 3}]}', "ranks.0"),
    ],
)
def test_a_file_that_is_no_report_is_refused_with_its_first_fault(
    tmp_path, content, said
):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        PrewarmReport.load(tmp_path / "x.json")


def test_ranks_beyond_the_world_and_doubled_ranks_are_refused():
    for ranks in ([5], [0, 0]):
        records = [RankRecord(rank=r, host="h", pid=1) for r in ranks]
        with pytest.raises(ValueError, match="below world_size 2"):
            a_report(ranks=records)


def test_an_unknown_task_or_rank_lists_the_known_ones():
    report = a_report()
    assert report.task("Cu", rank=1).compile_s == 7.0
    with pytest.raises(KeyError, match=r"unknown task 'Zn', known are: Cu, \[red\]Ni"):
        report.task("Zn")
    with pytest.raises(KeyError, match=r"unknown rank 9, known are \[0, 1\]"):
        report.task("Cu", rank=9)


def test_the_table_shows_each_rank_and_task_and_takes_no_markup_from_names():
    text = rendered(a_report())
    assert text.count("Cu") == 2
    assert text.count("[red]Ni") == 2
    assert "2.5 MB" in text and "600 > 604 MB" in text
    assert "graphs compiled from step 1 on: 0" in text
    assert "1800 s" in text
    assert "device" not in text
    with_device = a_report()
    with_device.ranks[0].tasks[0].device_after = 50_000_000
    assert "0 > 50 MB" in rendered(with_device)


def test_what_should_worry_is_said():
    assert a_report().warnings() == []
    close = a_report(group_timeout_s=10.0, compiled_after_start=3)
    assert any("2 s from being killed" in said for said in close.warnings())
    assert any("3 graphs compiled after step 1" in said for said in close.warnings())
    killed = a_report(group_timeout_s=5.0).warnings()
    assert any("would have been killed" in said for said in killed)
    # One process has nobody to wait for it.
    assert a_report(1, group_timeout_s=5.0).warnings() == []
    eager = a_report()
    eager.ranks[1].tasks[0].eager = True
    assert eager.warnings() == ["not compiled, runs in eager mode: Cu"]
    half = a_report()
    half.ranks[0].tasks[0].covers_training = False
    assert "Cu" in half.warnings()[0] and "without a backward" in half.warnings()[0]


def test_a_span_counts_from_the_meeting_and_adds_to_its_total():
    task = TaskRecord(name="a")
    task._origin = time.perf_counter()
    with pytest.raises(ZeroDivisionError), task.timed("trace"):
        _ = 1 / 0
    task.add_span("trace", task._origin + 5, task._origin + 7)
    assert [span.kind for span in task.spans] == ["trace", "trace"]
    assert task.spans[1].start_s == pytest.approx(5)
    assert task.trace_s == pytest.approx(2, abs=0.5)


@pytest.mark.parametrize("world_size", [1, 2, 100])
def test_the_picture_is_drawn_for_any_number_of_ranks(tmp_path, world_size):
    path = a_report(world_size).plot(tmp_path / "folder" / "prewarm.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_the_picture_names_units_tasks_ranks_and_the_verdict(tmp_path):
    path = draw(a_report(), tmp_path / "prewarm.svg")
    # Text is drawn as paths; matplotlib leaves each string as a comment.
    text = path.read_text()
    for words in (
        "graphs compiled from step 1 on: 0",
        "time since all ranks had arrived (s)",
        "memory (MB)",
        "released (MB)",
        "wait for the other ranks",
        "rank 1",
        "[red]Ni",
    ):
        assert f"<!-- {words}" in text or words in text, words


def test_a_report_without_tasks_and_one_of_one_rank_only_can_be_drawn(tmp_path):
    a_report(ranks=[]).plot(tmp_path / "none.png")
    one = a_report()
    one.ranks = one.ranks[1:]
    assert not one.is_complete
    one.plot(tmp_path / "one.png")
    assert "rank(s)" in rendered(one)


def test_a_full_disk_is_a_warning_and_not_the_end_of_training(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    a_report().write(tmp_path / "file")
    assert "cannot write" in caplog.text
