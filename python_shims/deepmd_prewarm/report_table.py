# SPDX-License-Identifier: LGPL-3.0-or-later
"""A prewarm report for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from .report import PrewarmReport, TaskRecord

__all__ = ["megabytes", "print_report", "tabulate", "tabulate_alive"]


def megabytes(size: float) -> str:
    """Bytes as a short text in MB (10**6), kB below one tenth of that.

    Parameters
    ----------
    size
        Bytes.

    Returns
    -------
    str
        For instance ``"12.3 MB"``.
    """
    if abs(size) < 1e5:
        return f"{size / 1e3:.1f} kB" if size else "0"
    return f"{size / 1e6:.1f} MB"


def _graphs(task: TaskRecord) -> str:
    if task.eager:
        return "eager"
    return f"{task.source} {task.graphs_forward}+{task.graphs_backward}"


def _backends(report: PrewarmReport) -> str:
    """Name each backend once, whatever devices it serves, and where ranks differ."""
    told = dict.fromkeys(
        backend.name
        + (f" {backend.timeout_s:.0f} s" if backend.timeout_s else "")
        + (f", {backend.communicator}" if backend.communicator else "")
        for record in report.ranks
        for backend in record.backends
    )
    return f" ({'; '.join(told)})" if told else ""


def _add_section(table: Table, rows: Sequence[Sequence[str]]) -> None:
    for number, row in enumerate(rows):
        # Task names are the user's: no markup in them.
        cells = (Text(cell) for cell in row)
        table.add_row(*cells, end_section=number == len(rows) - 1)


def tabulate(report: PrewarmReport) -> Table:
    """One row per rank and task.

    Parameters
    ----------
    report
        What to show.

    Returns
    -------
    rich.table.Table
        The table.
    """
    counted = report.compiled_after_start
    after = "not counted" if counted is None else str(counted)
    limit = report.group_timeout_s
    table = Table(
        title=f"deepmd-prewarm {report.version}: {report.world_size} rank(s) ready in"
        f" {report.wall_s:.1f} s",
        caption=f"graphs compiled from step 1 on: {after}"
        + (f"; process group time-out {limit:.0f} s" if limit else "")
        + _backends(report)
        + "\ngraphs: where from, forward + backward",
    )
    on_device = any(
        t.device_after or t.device_before for r in report.ranks for t in r.tasks
    )
    for heading in ("rank", "task", "mode", "graphs"):
        table.add_column(heading, justify="right" if heading == "rank" else "left")
    for heading in ("trace s", "compile s", "load s", "wait s", "released"):
        table.add_column(heading, justify="right")
    table.add_column("host memory", justify="right")
    if on_device:
        table.add_column("device memory", justify="right")
    for record in report.ranks:
        rows = []
        for number, task in enumerate(record.tasks):
            row = [
                str(record.rank) if number == 0 else "",
                task.name,
                task.mode,
                _graphs(task),
                *(
                    f"{seconds:.1f}"
                    for seconds in (
                        task.trace_s,
                        task.compile_s,
                        task.load_s,
                        task.wait_s,
                    )
                ),
                megabytes(task.bytes_released),
                f"{task.rss_before / 1e6:.0f} > {task.rss_after / 1e6:.0f} MB",
            ]
            if on_device:
                row.append(
                    f"{task.device_before / 1e6:.0f} > {task.device_after / 1e6:.0f} MB"
                )
            rows.append(row)
        _add_section(table, rows)
    return table


def tabulate_alive(report: PrewarmReport) -> Table | None:
    """One row for each group that a task's audit found.

    Parameters
    ----------
    report
        What to show.

    Returns
    -------
    rich.table.Table or None
        The table; None where no task was audited.
    """
    table = Table(title="made in a task's turn and still alive after it")
    for heading in ("rank", "task", "kind", "held by", "device", "count", "size"):
        right = heading in ("rank", "count", "size")
        table.add_column(heading, justify="right" if right else "left")
    audited = [
        (record.rank, task.name, task.alive)
        for record in report.ranks
        for task in record.tasks
        if task.alive is not None
    ]
    for rank, name, alive in audited:
        rows = [
            [
                str(rank) if number == 0 else "",
                name if number == 0 else "",
                one.kind,
                one.holder,
                one.device,
                str(one.count),
                megabytes(one.nbytes),
            ]
            for number, one in enumerate(alive)
        ]
        _add_section(table, rows or [[str(rank), name, "nothing"]])
    return table if audited else None


def print_report(report: PrewarmReport, console: Console) -> None:
    """Tables and warnings.

    Parameters
    ----------
    report
        What to show.
    console
        Where to.
    """
    console.print(tabulate(report))
    alive = tabulate_alive(report)
    if alive is not None:
        console.print(alive)
    for warning in report.warnings():
        console.print(Text(f"warning: {warning}", style="yellow"))
