# SPDX-License-Identifier: LGPL-3.0-or-later
"""Warming one task on this rank, and leaving nothing of it behind."""

from __future__ import annotations

import gc
import logging
import os
import time
import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch

from . import _library
from ._callee import compiled_in, modules_in
from .collective_free import collective_free, first_collective_module
from .compile_counters import CompileMeter
from .compile_leftovers import Leftovers, trim_heap
from .held_objects import largest
from .ops import cache_bytes, release_trace_inputs, safe_empty_cache
from .random_streams import unchanged_random_streams
from .report import SpanKind, TaskRecord
from .samples import Footprint, as_call, tensors_in
from .tasks import CompiledTask, warmup_compiled

if TYPE_CHECKING:
    from .prewarm import PrewarmTask, TaskHook

__all__ = ["TaskRun"]

_log = logging.getLogger(__name__)

# Lines of a task's audit in the report; each rank's record goes through the Store.
_GROUPS = 30


class TaskRun:
    """One task's turn on this rank.

    Parameters
    ----------
    task
        What to warm.
    earlier
        Records of the tasks warmed before, to tell a shared graph.
    origin
        Reading of `time.perf_counter` from which the record counts.
    device
        Whose memory to report; None: that of the task's parameters.
    leftovers
        Frees what compiling leaves behind; None: it stays.
    """

    def __init__(
        self,
        task: PrewarmTask,
        earlier: Sequence[TaskRecord],
        origin: float,
        device: torch.device | str | None,
        leftovers: Leftovers | None = None,
    ) -> None:
        self.task = task
        self.record = TaskRecord(name=task.name, mode=task.mode)
        self.record._origin = origin
        self._earlier = earlier
        self._leftovers = leftovers
        self._modules = [*task.modules, *modules_in(task.fn)]
        self._device = _device_of(self._modules) if device is None else device
        self._footprint = Footprint()
        self.record._footprint = self._footprint
        self._meter = CompileMeter()

    def warm(
        self, before_task: TaskHook | None, after_task: TaskHook | None
    ) -> BaseException | None:
        """Warm every sample, release, and fill in the record.

        Parameters
        ----------
        before_task, after_task
            Hooks around it.

        Returns
        -------
        BaseException or None
            What went wrong: it is the caller's to tell the other ranks.
        """
        if os.environ.get("DP_PREWARM_AUDIT", "0") in ("", "0"):
            return self._warm(before_task, after_task)
        from .audit import audit

        failure, warmed = None, False
        try:
            with audit() as found:
                failure = self._warm(before_task, after_task)
                warmed = True
            self.record.alive = largest(found.held, _GROUPS)
        except Exception as error:
            if not warmed:
                raise
            _log.warning(
                "deepmd-prewarm: cannot tell what '%s' left alive (%s: %s). Training is"
                " not affected",
                self.task.name,
                type(error).__name__,
                error,
            )
        return failure

    def _warm(
        self, before_task: TaskHook | None, after_task: TaskHook | None
    ) -> BaseException | None:
        record, device = self.record, torch.device(self._device)
        record.device = str(device)
        record.rss_before = psutil.Process().memory_info().rss
        record.device_before, record.device_used_before = cache_bytes(device)
        record.pinned_before = _pinned_bytes(device)
        failure: BaseException | None = None
        start = time.perf_counter()
        self._meter.start()
        try:
            with (
                torch.profiler.record_function(f"deepmd_prewarm::{self.task.name}"),
                unchanged_random_streams(),
            ):
                self._with_hooks(before_task, after_task)
        except BaseException as error:
            failure = error
            record.error = f"{type(error).__name__}: {error}"
        counts = self._meter.stop()
        record.graphs_forward = counts.forward
        record.graphs_backward = counts.backward
        record.cache_hits = counts.cache_hits
        record.cache_misses = counts.cache_misses
        end = time.perf_counter()
        self._fill_spans(start, end)
        self._release_leftovers()
        if gc.isenabled():  # a trainer that switched it off has its reasons
            gc.collect()
        trim_heap()
        safe_empty_cache(device)
        record.bytes_released += self._footprint.gone()
        record.rss_after = psutil.Process().memory_info().rss
        record.device_after, record.device_used_after = cache_bytes(device)
        record.pinned_after = _pinned_bytes(device)
        record.add_span("release", end, time.perf_counter())
        return failure

    def _release_leftovers(self) -> None:
        if self._leftovers is None:
            return
        try:
            self._leftovers.release()
        except Exception as error:  # ours: costs memory, not the training
            _log.warning(
                "deepmd-prewarm: cannot free what compiling '%s' left behind"
                " (%s: %s). Training is not affected",
                self.task.name,
                type(error).__name__,
                error,
            )
            self._leftovers = None

    def _with_hooks(
        self, before_task: TaskHook | None, after_task: TaskHook | None
    ) -> None:
        try:
            if before_task is not None:
                before_task(self.task, self.record)
            self._warm_samples()
            graph = self.task.graph
            self.record.graph = graph() if callable(graph) else graph
        finally:
            if after_task is not None:
                after_task(self.task, self.record)
        self._tell_source()

    def _warm_samples(self) -> None:
        task, record = self.task, self.record
        doubtful = first_collective_module(self._modules)
        if doubtful is not None and torch.distributed.is_initialized():
            _log.warning(
                "deepmd-prewarm: task '%s' holds a %s, whose forward is a collective:"
                " ranks that compile at different speed wait in it",
                task.name,
                doubtful,
            )
        handle = CompiledTask.from_callable(task.name, task.fn, task.modules)
        owned = callable(task.samples)
        samples: Iterable[Any] = (
            task.samples() if callable(task.samples) else task.samples
        )
        try:
            with collective_free(self._modules):
                for sample in samples:
                    record.samples += 1
                    args, kwargs = as_call(sample)
                    inputs = list(tensors_in((args, kwargs))) if owned else []
                    self._footprint.add(inputs)
                    backward = task.mode == "train"
                    warmup_compiled(handle, args, kwargs, backward=backward)
                    # Only what nobody but `inputs` holds may be released.
                    del sample, args, kwargs
                    release_trace_inputs(inputs)
                    del inputs
            if not record.samples:
                raise ValueError(
                    f"prewarm: expected at least one sample for task '{task.name}',"
                    " got none"
                )
            stats = handle.stats()
            record.eager = stats["eager_runs"] > 0
            record.covers_training = bool(stats["covers_training"])
        finally:
            handle.close()

    def _tell_source(self) -> None:
        record, counts = self.record, self._meter.read()
        same = [
            other
            for other in self._earlier
            if record.graph is not None and other.graph == record.graph
        ]
        if counts.total == 0 and not same:
            # Nothing to compile is right only for what was compiled before.
            record.eager = record.eager or not reaches_compiled(self.task.fn)
        if same or (counts.total == 0 and not record.eager):
            record.source = "shared"
        elif counts.cache_hits and not counts.cache_misses:
            record.source = "loaded"

    def _fill_spans(self, start: float, end: float) -> None:
        """Split the turn: compiling and loading first, tracing, running the rest."""
        record = self.record
        origin = record._origin
        traced = [s for s in record.spans if s.kind == "trace"]
        given = record.trace_s
        record.spans = [s for s in record.spans if s.kind != "trace"]
        taken: list[tuple[float, float]] = []
        for span in self._meter.spans:
            kind: SpanKind = "load" if span.loaded else "compile"
            record.add_span(kind, span.start, span.end)
            taken.append((span.start, span.end))
        for trace in traced:
            whole = (trace.start_s + origin, trace.end_s + origin)
            for piece in _gaps(whole, taken):
                record.add_span("trace", *piece)
            taken.append(whole)
        if traced:
            record.trace_s = sum(
                s.end_s - s.start_s for s in record.spans if s.kind == "trace"
            )
        else:
            record.trace_s = given
        for piece in _gaps((start, end), taken):
            record.add_span("run", *piece)
        record.spans.sort(key=lambda span: span.start_s)


def _gaps(
    whole: tuple[float, float], taken: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Cut out what of `whole` is left between the intervals of `taken`."""
    left = []
    at, end = whole
    for begin, finish in sorted(taken):
        if begin >= end:
            break
        if begin > at:
            left.append((at, begin))
        at = max(at, finish)
    if at < end:
        left.append((at, end))
    return left


def reaches_compiled(fn: Any, depth: int = 4) -> bool:
    """Whether a callable is known to reach something that `torch.compile` made.

    Parameters
    ----------
    fn
        What a task calls.
    depth
        How many closures to follow.

    Returns
    -------
    bool
        False also where it cannot be seen, as in a plain container.
    """
    if any(True for _ in compiled_in(fn)):
        return True
    if depth == 0:
        return False
    cells = getattr(fn, "__closure__", None) or ()
    inner = [cell.cell_contents for cell in cells if cell != types.CellType()]
    return any(reaches_compiled(one, depth - 1) for one in inner if callable(one))


def _pinned_bytes(device: torch.device) -> int:
    # Only where a device is in use; the bridge is there, it made the handle.
    if not cache_bytes(device)[0]:
        return 0
    return int(_library.bridge().pinned_bytes(device.type))


def _device_of(modules: Sequence[torch.nn.Module]) -> torch.device:
    for module in modules:
        for parameter in module.parameters():
            return parameter.device
    return torch.device("cpu")
