# SPDX-License-Identifier: LGPL-3.0-or-later
"""What prewarming did: the record of each task on each rank, as JSON and table.

The JSON's keys are a contract (``prewarm.json``); keys that a newer version
added are kept when an older one loads and saves a report.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from .held_objects import Held

if TYPE_CHECKING:
    from rich.table import Table

    from .compile_watch import CompileWatch

__all__ = ["BackendRecord", "PrewarmReport", "RankRecord", "Span", "TaskRecord"]

_log = logging.getLogger(__name__)

Source = Literal["compiled", "loaded", "shared"]
SpanKind = Literal["trace", "compile", "load", "run", "release", "wait"]

_SHORTEST_WARNED = 0.5


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow", validate_assignment=True)


class Span(_Record):
    """One stretch of a task's time, in seconds since all ranks had arrived."""

    kind: SpanKind
    start_s: float
    end_s: float


class TaskRecord(_Record):
    """One task on one rank. Times in seconds, memory in bytes."""

    name: str
    mode: Literal["train", "eval"] = "train"
    #: digest of the task's graph, where its maker gave one
    graph: str | None = None
    source: Source = "compiled"
    trace_s: float = 0.0
    compile_s: float = 0.0
    load_s: float = 0.0
    #: waiting for the other ranks to finish the same task
    wait_s: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    #: storages that tracing and warming made and that are gone now
    bytes_released: int = 0
    rss_before: int = 0
    rss_after: int = 0
    device_before: int = 0
    device_after: int = 0

    # Beyond the contract.
    device: str = "cpu"
    #: of `device_before` and `device_after`, what tensors use
    device_used_before: int = 0
    device_used_after: int = 0
    #: page-locked host memory
    pinned_before: int = 0
    pinned_after: int = 0
    samples: int = 0
    #: running the samples, compiling and loading taken off
    run_s: float = 0.0
    graphs_forward: int = 0
    graphs_backward: int = 0
    #: nothing of the task is compiled: torch.compile was not asked or gave up
    eager: bool = False
    #: what went wrong, where the task failed
    error: str | None = None
    #: a training warm-up had gradients on and ran a backward
    covers_training: bool = True
    spans: list[Span] = Field(default_factory=list)
    #: what its turn made and left alive, by holder; None: not asked for
    alive: list[Held] | None = None

    _origin: float = PrivateAttr(default=0.0)
    _footprint: Any = PrivateAttr(default=None)

    def watch(self, tensors: Iterable[Any]) -> None:
        """Count the storages of tensors as released, once they are gone.

        For hooks that see what tracing was fed; nothing is kept alive.

        Parameters
        ----------
        tensors
            Tensors that the task's tracing and warming made.
        """
        if self._footprint is not None:
            self._footprint.add(tensors)

    def add_span(self, kind: SpanKind, start: float, end: float) -> None:
        """Add one stretch of time to the task.

        Parameters
        ----------
        kind
            What the time went into; it is added to ``<kind>_s``.
        start, end
            Readings of `time.perf_counter`.
        """
        self.spans.append(
            Span(kind=kind, start_s=start - self._origin, end_s=end - self._origin)
        )
        total = f"{kind}_s"
        if total in type(self).model_fields:
            setattr(self, total, getattr(self, total) + end - start)

    @contextmanager
    def timed(self, kind: SpanKind) -> Iterator[None]:
        """Time what happens inside, also if it raises.

        Parameters
        ----------
        kind
            As in `add_span`; hooks use it for ``"trace"``.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_span(kind, start, time.perf_counter())


class BackendRecord(_Record):
    """One backend of the process group, after all ranks are connected."""

    #: device type that it serves
    device: str
    name: str
    #: of its collectives, in seconds; None: it does not tell
    timeout_s: float | None = None
    #: "none", "time-out", "communicator error", "remote error"; empty: it does not tell
    error: str = ""
    #: what NCCL says about the communicator, e.g. "ncclSuccess"; empty: unknown
    communicator: str = ""

    @property
    def problem(self) -> str:
        """What is wrong with it, empty if nothing is known to be."""
        if self.communicator not in ("", "ncclSuccess", "not connected"):
            return self.communicator
        return "" if self.error == "none" else self.error


class RankRecord(_Record):
    """One rank's tasks, in the order in which they were warmed."""

    rank: int
    host: str
    pid: int
    tasks: list[TaskRecord] = Field(default_factory=list)
    #: entry of prewarming, in seconds before all ranks had arrived (<= 0)
    entered_s: float = 0.0
    #: graphs compiled from step 1 on, by this rank; None: not known (yet)
    compiled_after_start: int | None = None
    #: backends of the process group
    backends: list[BackendRecord] = Field(default_factory=list)


class PrewarmReport(_Record):
    """What prewarming did on all ranks.

    Rank 0 of the group holds every rank's record, the others only their own
    (reading all of them everywhere would cost the Store world_size ** 2).
    """

    version: str
    world_size: int
    #: from entry of prewarming to the last rank's verdict
    wall_s: float = 0.0
    group_timeout_s: float | None = None
    #: graphs compiled from step 1 on, by all ranks; None: not known (yet)
    compiled_after_start: int | None = None
    ranks: list[RankRecord] = Field(default_factory=list)

    # Beyond the contract.
    torch_version: str = ""
    #: why prewarming was given up on all ranks; empty: it was not
    degraded: list[str] = Field(default_factory=list)

    # Who was asked, for `watch`: dist.ProcessGroup | None, Path | None.
    _group: Any = PrivateAttr(default=None)
    _report_dir: Any = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _ranks_fit(self) -> PrewarmReport:
        known = [record.rank for record in self.ranks]
        if len(set(known)) != len(known) or any(
            not 0 <= rank < self.world_size for rank in known
        ):
            raise ValueError(
                f"ranks must be different and below world_size {self.world_size},"
                f" got {known}"
            )
        return self

    @property
    def is_complete(self) -> bool:
        """Whether every rank's record is here."""
        return len(self.ranks) == self.world_size

    def watch(self) -> CompileWatch:
        """Count what compiles from now on; call it right before step 1.

        Returns
        -------
        CompileWatch
            Its ``finish()``, at the end of training, sets
            `compiled_after_start`.
        """
        from .compile_watch import CompileWatch

        return CompileWatch(self, self._group, self._report_dir)

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write ``prewarm.json`` and ``prewarm.png``; a fault is a warning only.

        Parameters
        ----------
        folder
            Where; it is made.
        """
        try:
            self.save(Path(folder) / "prewarm.json")
            self.plot(Path(folder) / "prewarm.png")
        except Exception as error:  # a full disk must not end a training
            _log.warning("deepmd-prewarm: cannot write to '%s': %s", folder, error)

    def task(self, name: str, rank: int | None = None) -> TaskRecord:
        """Look up one task.

        Parameters
        ----------
        name
            The task's name.
        rank
            Rank; None: the first one this report holds.

        Returns
        -------
        TaskRecord
            Its record.

        Raises
        ------
        KeyError
            If the task or the rank is unknown; the message lists the known.
        """
        records = [r for r in self.ranks if rank is None or r.rank == rank]
        if not records:
            known = [r.rank for r in self.ranks]
            raise KeyError(f"PrewarmReport: unknown rank {rank}, known are {known}")
        for task in records[0].tasks:
            if task.name == name:
                return task
        known_tasks = ", ".join(task.name for task in records[0].tasks) or "none"
        raise KeyError(
            f"PrewarmReport: unknown task {name!r}, known are: {known_tasks}"
        )

    def warnings(self) -> list[str]:
        """List what a reader should be told.

        Returns
        -------
        list of str
            One sentence each; empty if all is well.
        """
        said = []
        limit = self.group_timeout_s
        busiest = max(
            (
                (task.trace_s + task.compile_s + task.load_s, task.name, record.rank)
                for record in self.ranks
                for task in record.tasks
            ),
            default=(0.0, "", 0),
        )
        if limit and self.world_size > 1 and busiest[0] > _SHORTEST_WARNED * limit:
            seconds, name, rank = busiest
            said.append(
                f"task '{name}' took {seconds:.0f} s to compile on rank {rank}, the"
                f" process group's time-out is {limit:.0f} s: "
                + (
                    f"without prewarming this job was {limit - seconds:.0f} s from"
                    " being killed"
                    if seconds < limit
                    else "without prewarming this job would have been killed"
                )
            )
        eager = sorted(
            {task.name for record in self.ranks for task in record.tasks if task.eager}
        )
        if eager:
            said.append(f"not compiled, runs in eager mode: {', '.join(eager)}")
        uncovered = sorted(
            {
                task.name
                for record in self.ranks
                for task in record.tasks
                if task.mode == "train" and not (task.covers_training or task.eager)
            }
        )
        if uncovered:
            said.append(
                "warmed without gradients or without a backward, which training may"
                f" still compile: {', '.join(uncovered)}"
            )
        if self.compiled_after_start:
            said.append(
                f"{self.compiled_after_start} graphs compiled after step 1: a shape"
                " or a mode that no sample covered"
            )
        said.extend(
            f"rank {record.rank}: {backend.name} on {backend.device} reports"
            f" {backend.problem}"
            for record in self.ranks
            for backend in record.backends
            if backend.problem
        )
        said.extend(f"prewarming was given up: {reason}" for reason in self.degraded)
        return said

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as JSON, whole or not at all.

        Parameters
        ----------
        path
            File to write; its folder is made.

        Returns
        -------
        pathlib.Path
            The file.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replaced in one step: a reader never sees half a report.
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(target)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrewarmReport:
        """Read a report that `save` wrote.

        Parameters
        ----------
        path
            The JSON file, or the folder that holds ``prewarm.json``.

        Returns
        -------
        PrewarmReport
            The report.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is not a prewarm report; the message names the first fault.
        """
        source = Path(path)
        if source.is_dir():
            source = source / "prewarm.json"
        if not source.is_file():
            raise FileNotFoundError(
                f"PrewarmReport.load: expected a prewarm.json, got '{source}', which"
                " does not exist. `deepmd-prewarm train INPUT.json --report DIR`"
                " writes one"
            )
        try:
            return cls.model_validate_json(source.read_text(encoding="utf-8"))
        except (ValidationError, UnicodeDecodeError) as error:
            first = (
                "; ".join(
                    f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}"
                    for fault in error.errors()[:1]
                )
                if isinstance(error, ValidationError)
                else str(error)
            )
            raise ValueError(
                f"PrewarmReport.load: expected the JSON of a prewarm report, got"
                f" '{source}' ({first})"
            ) from error

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the timeline of each rank and the memory after each task.

        Parameters
        ----------
        path
            Image to write; its suffix chooses the format.

        Returns
        -------
        pathlib.Path
            The file.
        """
        from .report_plot import draw

        return draw(self, Path(path))

    def table(self) -> Table:
        """Make a `rich` table of the report.

        Returns
        -------
        rich.table.Table
            One row per rank and task.
        """
        from .report_table import tabulate

        return tabulate(self)
