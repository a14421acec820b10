# SPDX-License-Identifier: LGPL-3.0-or-later
"""DP_PREWARM_AUDIT=1: the report says what each task left alive."""

from __future__ import annotations

import importlib
import io
import logging
from pathlib import Path

import pytest
import torch
from deepmd_prewarm.held_objects import Held, largest
from deepmd_prewarm.prewarm import prewarm
from deepmd_prewarm.report import PrewarmReport
from deepmd_prewarm.report_table import print_report, tabulate_alive
from rich.console import Console

# The package has a function of this name.
audit_module = importlib.import_module("deepmd_prewarm.audit")
_kept: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    _kept.clear()


def loss(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def keeping_loss(x: torch.Tensor) -> torch.Tensor:
    _kept.append(x * 2)
    return x.sum()


def warmed() -> PrewarmReport:
    return prewarm(
        {
            "clean": (loss, lambda: [(torch.ones(100),)]),
            "leaking": (keeping_loss, lambda: [(torch.ones(1000),)]),
        },
        progress=False,
    )


def shown(report: PrewarmReport) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_report(report, console)
    return console.file.getvalue()


def test_the_task_that_keeps_something_is_named_with_holder_and_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DP_PREWARM_AUDIT", "1")
    report = warmed()
    assert report.task("clean").alive == []
    kept = Held(
        kind="tensor",
        holder="global test_audit_of_tasks._kept",
        device="cpu",
        count=1,
        nbytes=4000,
    )
    assert report.task("leaking").alive == [kept]
    loaded = PrewarmReport.load(report.save(tmp_path / "prewarm.json"))
    assert loaded.task("leaking").alive == [kept]
    text = shown(loaded)
    assert "global test_audit_of_tasks._kept" in text and "4.0 kB" in text
    assert "nothing" in text


@pytest.mark.parametrize("value", [None, "0", ""])
def test_it_is_off_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("DP_PREWARM_AUDIT", raising=False)
    if value is not None:
        monkeypatch.setenv("DP_PREWARM_AUDIT", value)
    monkeypatch.setattr(audit_module, "audit", None)  # would raise if it was called
    report = warmed()
    assert report.task("leaking").alive is None
    assert tabulate_alive(report) is None
    assert "still alive" not in shown(report)


def test_a_fault_in_the_audit_is_a_warning_and_the_task_is_warm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DP_PREWARM_AUDIT", "1")

    def broken(*_: object) -> None:
        raise KeyError("holder")

    monkeypatch.setattr(audit_module, "_fill", broken)
    with caplog.at_level(logging.WARNING):
        report = warmed()
    assert report.task("leaking").samples == 1
    assert report.task("leaking").alive is None
    assert any("'leaking'" in r.getMessage() for r in caplog.records)


def test_a_task_that_fails_raises_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DP_PREWARM_AUDIT", "1")

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        prewarm({"a": (broken, lambda: [(torch.ones(3),)])}, progress=False)


def test_small_groups_are_added_up() -> None:
    groups = [
        Held(kind="tensor", holder=f"h{i}", device="cpu", count=1, nbytes=9 - i)
        for i in range(5)
    ]
    groups.append(Held(kind="graph", holder="list", count=2))
    kept = largest(groups, 3)
    assert kept[:3] == groups[:3]
    assert [(one.kind, one.count, one.nbytes) for one in kept[3:]] == [
        ("tensor", 2, 11),
        ("graph", 2, 0),
    ]
    assert largest(groups, 10) == groups
