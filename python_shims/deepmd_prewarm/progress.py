# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a person at the terminal sees while tasks compile.

A bar on a terminal; plain lines, one per task, where the output goes to a file.
Written to stderr by rank 0 only: stdout belongs to the training.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from .report import TaskRecord

__all__ = ["Bar", "Lines", "ProgressView", "Silent", "make_view"]


class ProgressView(Protocol):
    """How the loop over tasks tells where it is."""

    def begin(self, name: str, number: int, count: int) -> None:
        """Show that task `number` of `count` starts, counted from 1."""

    def compiled(self, record: TaskRecord) -> None:
        """Show that the task is ready here, and this rank waits for the others."""

    def finish(self, record: TaskRecord) -> None:
        """Show that the task is ready on all ranks."""

    def close(self) -> None:
        """Tidy up: nothing more comes, also after an error."""


def _done(record: TaskRecord) -> str:
    work = record.trace_s + record.compile_s + record.load_s + record.run_s
    verb = "eager" if record.eager else record.source
    return f"{verb} in {work:.1f} s, waited {record.wait_s:.1f} s"


class Silent:
    """Shows nothing."""

    def begin(self, name: str, number: int, count: int) -> None:
        """Nothing."""

    def compiled(self, record: TaskRecord) -> None:
        """Nothing."""

    def finish(self, record: TaskRecord) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """One line when a task starts, one when it is ready everywhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._where = ""

    def begin(self, name: str, number: int, count: int) -> None:
        """Say which task starts."""
        self._where = f"prewarm {number}/{count} '{name}'"
        print(f"{self._where}: compiling", file=self._stream, flush=True)

    def compiled(self, record: TaskRecord) -> None:
        """Nothing."""

    def finish(self, record: TaskRecord) -> None:
        """Say how it went."""
        print(f"{self._where}: {_done(record)}", file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing."""


class Bar:
    """A bar with the running task and the time, and a line for each ready one."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self._progress: Progress = Progress(
            SpinnerColumn(),
            TextColumn("prewarm"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
            # A spinner must not slow the compiler down.
            refresh_per_second=4,
        )
        self._bar: TaskID | None = None
        self._name = ""

    def begin(self, name: str, number: int, count: int) -> None:
        """Show the running task."""
        self._name = name
        if self._bar is None:
            self._progress.start()
            self._bar = self._progress.add_task("", total=count)
        self._progress.update(self._bar, description=f"{name}: compiling")

    def compiled(self, record: TaskRecord) -> None:
        """Show that this rank waits."""
        if self._bar is not None:
            self._progress.update(
                self._bar, description=f"{self._name}: waiting for the other ranks"
            )

    def finish(self, record: TaskRecord) -> None:
        """Leave a line above the bar."""
        if self._bar is not None:
            self._progress.console.print(
                f"prewarm '{self._name}': {_done(record)}",
                markup=False,
                highlight=False,
            )
            self._progress.advance(self._bar)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._progress.stop()


def make_view(shown: bool | None, rank: int) -> ProgressView:
    """Choose how to show progress.

    Parameters
    ----------
    shown
        False: not at all. None or True: on rank 0.
    rank
        This rank in its group.

    Returns
    -------
    ProgressView
        A bar on a terminal, lines elsewhere.
    """
    if shown is False or rank != 0:
        return Silent()
    return Bar(sys.stderr) if sys.stderr.isatty() else Lines(sys.stderr)
