# SPDX-License-Identifier: LGPL-3.0-or-later
"""The whole loop: compile, warm, release, empty, meet; task by task.

All ranks warm the same task at the same time and meet after each one, so that
a fault on one rank ends all of them after that task and not after the last.
Nobody waits in a collective; see `deepmd_prewarm.agreement`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from . import _library
from .agreement import (
    agree,
    agree_to_degrade,
    connect_communicators,
    entering,
    rest,
    task_fingerprint,
    watch,
)
from .progress import make_view
from .record_exchange import RecordExchange
from .report import BackendRecord, PrewarmReport, RankRecord, TaskRecord
from .samples import Samples

__all__ = ["PrewarmTask", "TaskHook", "prewarm"]

_log = logging.getLogger(__name__)

#: Called with a task and its record, on every rank, before or after warming.
TaskHook = Callable[["PrewarmTask", TaskRecord], None]


@dataclass
class PrewarmTask:
    """One thing that training will compile.

    Attributes
    ----------
    name
        What errors and reports call it; different for each task.
    fn
        What training will call, in the context in which it will: the DDP
        module, a compiled callable, a closure that returns the loss. It
        returns a tensor, or a nest (dict, list, tuple, dataclass) of them.
    samples
        One for each shape class that training will meet: a tuple (arguments),
        a dict (keyword arguments), a pair of both, or a tensor. They are handed
        on unchanged. A callable is called when the task's turn comes, what it
        makes is dropped and its memory released afterwards; what is passed in
        a sequence stays the caller's.
    modules
        Modules whose parameters, gradients and buffers are put back, beside
        those found in `fn`.
    mode
        ``"train"``: forward and backward. ``"eval"``: forward only; `fn` sets
        eval mode and ``torch.no_grad`` as training's evaluation will.
    graph
        Digest of the graph, or a callable that gives it after warming; equal
        ones are reported as ``"shared"``.
    """

    name: str
    fn: Callable[..., Any]
    samples: Samples
    modules: Sequence[torch.nn.Module] = ()
    mode: Literal["train", "eval"] = "train"
    graph: str | Callable[[], str | None] | None = None


#: A list of tasks, or ``{name: (fn, samples)}`` for those who need no more.
Tasks = Sequence[PrewarmTask] | Mapping[str, Any]


def prewarm(
    tasks: Tasks,
    group: dist.ProcessGroup | None = None,
    *,
    only: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
    report_dir: str | os.PathLike[str] | None = None,
    before_task: TaskHook | None = None,
    after_task: TaskHook | None = None,
) -> PrewarmReport:
    """Compile every task before step 1, free what that needed, meet all ranks.

    Call it on every rank with the same tasks in the same order, right before
    the first step. Blocks until all ranks are ready, however long that takes;
    not a collective. Parameters, gradients, buffers, optimizers and the global
    random streams (Python, NumPy, torch) are as before, also on error.

    Parameters
    ----------
    tasks
        Tasks, or a mapping from names to ``(fn, samples)``.
    group
        The ranks that train together; None: all, or this process alone.
    only
        Names of the tasks to warm; None: all.
    device
        Whose memory is reported and given back after each task; None: the
        device of the task's parameters.
    progress
        False: show none. Else a bar, or lines, on rank 0's stderr.
    report_dir
        Folder where rank 0 writes ``prewarm.json`` and ``prewarm.png``.
    before_task, after_task
        Called with the task and its record around warming it; an exception is
        one of the task. `after_task` is also called when the task failed.

    Returns
    -------
    PrewarmReport
        What was done; on rank 0 of all ranks, elsewhere of this one. Its
        ``watch()`` counts what still compiles after step 1.

    Raises
    ------
    ValueError
        On all ranks (RuntimeError where the fault is not their own): no task,
        a name that is empty, doubled or unknown, a task without samples.
    TypeError
        Likewise, for a sample that is no tuple, dict or tensor, and for a
        callable that returns no tensor.
    RuntimeError
        If another rank failed: it names that rank, its task and its error. If
        ranks have different tasks: it names the first difference.
    BaseException
        What a task raised on this rank, as it was.
    """
    entered = time.perf_counter()
    report = PrewarmReport(
        version=version("deepmd-prewarm"),
        torch_version=torch.__version__,
        world_size=1,
    )
    members = _members(group)
    if members is not None:
        report.world_size = members.size()
        report.group_timeout_s = group_timeout_s(members)
    report._group = members
    report._report_dir = None if report_dir is None else Path(report_dir)
    report.degraded = agree_to_degrade(members, _library_problem())
    if report.degraded:
        return _degrade(report)
    watch(members)
    listed = _agreed_tasks(tasks, only, members, report.world_size)
    opened = time.perf_counter()
    mine = RankRecord(
        rank=0 if members is None else members.rank(),
        host=os.uname().nodename,
        pid=os.getpid(),
        entered_s=entered - opened,
    )
    from .compile_leftovers import Leftovers
    from .task_run import TaskRun

    leftovers = Leftovers()
    view = make_view(progress, mine.rank)
    try:
        for number, task in enumerate(listed, 1):
            view.begin(task.name, number, len(listed))
            entering(f"compile {task.name}")
            run = TaskRun(task, mine.tasks, opened, device, leftovers)
            failure = run.warm(before_task, after_task)
            view.compiled(run.record)
            waiting = time.perf_counter()
            _meet(task.name, failure, members, mine.rank)
            run.record.add_span("wait", waiting, time.perf_counter())
            view.finish(run.record)
            mine.tasks.append(run.record)
    finally:
        view.close()
    trained_on = mine.tasks[0].device
    connect_communicators(members, trained_on)
    mine.backends = _backends(members, trained_on)
    _gather(report, mine, members, opened)
    entering("training")
    rest()
    if mine.rank == 0:
        for warning in report.warnings():
            _log.warning("deepmd-prewarm: %s", warning)
        if report_dir is not None:
            report.write(report_dir)
    return report


def group_timeout_s(group: dist.ProcessGroup) -> float | None:
    """Read the time-out of a group's collectives.

    Parameters
    ----------
    group
        A process group.

    Returns
    -------
    float or None
        Seconds, the shortest of its backends; None if they do not tell.
    """
    limits = []
    for device in getattr(group, "_device_types", []):
        try:
            limits.append(group._get_backend(device).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return min(limits, default=None)


def _backends(members: dist.ProcessGroup | None, device: str) -> list[BackendRecord]:
    if members is None:
        return []
    index = torch.device(device).index
    try:
        states = _library.bridge().backend_states(
            members.group_name, -1 if index is None else index
        )
    except RuntimeError as error:  # a line less in the report
        _log.warning("deepmd-prewarm: cannot read the group's backends: %s", error)
        return []
    states.sort(key=lambda state: str(state["device"]))
    return [BackendRecord(**state) for state in states]


def _members(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Find the ranks to meet; None where torch.distributed is not in use."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "prewarm: expected group to be a ProcessGroup that this rank is a member"
            f" of, got {group!r}"
        )
    return group


def _library_problem() -> str | None:
    try:
        _library.load()
    except ImportError as error:
        return str(error)
    return None


def _degrade(report: PrewarmReport) -> PrewarmReport:
    text = (
        "deepmd-prewarm: cannot work here, training goes on without it on all ranks"
        f" ({'; '.join(report.degraded)}). DP_PREWARM_STRICT=1 makes this an error"
    )
    if os.environ.get("DP_PREWARM_STRICT", "") not in ("", "0"):
        raise ImportError(text)
    rank = 0 if report._group is None else report._group.rank()
    if rank == 0:
        _log.warning(text)
    return report


def _agreed_tasks(
    tasks: Tasks,
    only: Sequence[str] | None,
    members: dist.ProcessGroup | None,
    world_size: int,
) -> list[PrewarmTask]:
    listed: list[PrewarmTask] = []
    failure: Exception | None = None
    try:
        listed = _checked(tasks, only)
    except Exception as error:
        failure = error
    fingerprint = task_fingerprint([f"{t.name} ({t.mode})" for t in listed], world_size)
    agree("prewarm: task list", failure, members, fingerprint=fingerprint)
    return listed


def _checked(tasks: Tasks, only: Sequence[str] | None) -> list[PrewarmTask]:
    listed = [_as_task(*item) for item in _items(tasks)]
    if not listed:
        raise ValueError("prewarm: expected at least one task, got none")
    names = [task.name for task in listed]
    for task in listed:
        if not isinstance(task.name, str) or not task.name:
            raise ValueError(
                "prewarm: expected each task to have a name, got"
                f" {task.name!r} for task {listed.index(task) + 1}"
            )
        if names.count(task.name) > 1:
            raise ValueError(
                f"prewarm: expected different task names, got '{task.name}'"
                f" {names.count(task.name)} times"
            )
        if task.mode not in ("train", "eval"):
            raise ValueError(
                f"prewarm: expected mode 'train' or 'eval' of task '{task.name}',"
                f" got {task.mode!r}"
            )
        if not callable(task.fn):
            raise TypeError(
                f"prewarm: expected fn of task '{task.name}' to be callable, got"
                f" {type(task.fn).__name__}"
            )
        if isinstance(task.samples, torch.Tensor | dict | str) or not (
            callable(task.samples) or isinstance(task.samples, Sequence)
        ):
            raise TypeError(
                f"prewarm: expected samples of task '{task.name}' to be a list with"
                " one sample for each shape class, or a callable that makes them, got"
                f" {type(task.samples).__name__}"
            )
        if isinstance(task.samples, Sequence) and not task.samples:
            raise ValueError(
                f"prewarm: expected at least one sample for task '{task.name}', got"
                " none"
            )
    if only is not None:
        unknown = [name for name in only if name not in names]
        if unknown or not only:
            raise ValueError(
                f"prewarm: expected only to name tasks among {', '.join(names)}, got"
                f" {', '.join(unknown) or 'none'}"
            )
        listed = [task for task in listed if task.name in only]
    return listed


def _items(tasks: Tasks) -> Iterable[tuple[str | None, Any]]:
    if isinstance(tasks, Mapping):
        return list(tasks.items())
    if isinstance(tasks, Sequence) and not isinstance(tasks, str):
        return [(None, task) for task in tasks]
    raise TypeError(
        "prewarm: expected a list of PrewarmTask or a mapping from names to (fn,"
        f" samples), got {type(tasks).__name__}"
    )


def _as_task(name: str | None, task: Any) -> PrewarmTask:
    if isinstance(task, PrewarmTask):
        if name is not None and name != task.name:
            raise ValueError(
                f"prewarm: expected the task below {name!r} to have that name, got"
                f" {task.name!r}"
            )
        return task
    if name is None or not isinstance(task, tuple) or len(task) != 2:
        raise TypeError(
            "prewarm: expected a PrewarmTask, or (fn, samples) below a name, got"
            f" {type(task).__name__}{'' if name is None else f' below {name!r}'}"
        )
    return PrewarmTask(name, *task)


def _meet(
    name: str,
    failure: BaseException | None,
    members: dist.ProcessGroup | None,
    rank: int,
) -> None:
    note = getattr(failure, "add_note", None)  # Python 3.11
    if note is not None:
        note(f"deepmd-prewarm: in task '{name}' on rank {rank}")
    try:
        agree(name, failure, members)
    finally:
        # The traceback holds this frame: a cycle with the samples in it.
        del failure


def _gather(
    report: PrewarmReport,
    mine: RankRecord,
    members: dist.ProcessGroup | None,
    opened: float,
) -> None:
    """Bring all records to rank 0; the verdict on all tasks is known by now."""
    elapsed = time.perf_counter() - opened
    report.ranks = [mine]
    if members is not None and members.size() > 1:
        exchange = RecordExchange(members, "records")
        exchange.publish(mine.model_dump_json())
        agree("prewarm: report", None, members)
        if exchange.rank == 0:
            texts = exchange.collect(timeout_s=60.0)
            report.ranks = [
                mine if rank == 0 else RankRecord.model_validate_json(text)
                for rank, text in texts.items()
            ]
    # All ranks leave a meeting together, so `opened` is the same for all.
    report.wall_s = elapsed - min(record.entered_s for record in report.ranks)
