# SPDX-License-Identifier: LGPL-3.0-or-later
"""Counting what still compiles once training has started."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from .compile_counters import CompileCounts, CompileMeter
from .record_exchange import RecordExchange

if TYPE_CHECKING:
    from .report import PrewarmReport

__all__ = ["CompileWatch"]

_log = logging.getLogger(__name__)


class CompileWatch:
    """Counts graphs compiled from now on; made by `PrewarmReport.watch`.

    Reading costs nothing. `finish`, at the end of training, brings the counts
    of all ranks into the report.

    Parameters
    ----------
    report
        The report that gets the number.
    group
        The ranks; None: this process alone.
    report_dir
        Folder where rank 0 writes ``prewarm.json`` and ``prewarm.png`` again.
    """

    def __init__(
        self,
        report: PrewarmReport,
        group: dist.ProcessGroup | None,
        report_dir: Path | None,
    ) -> None:
        self._report = report
        self._group = group
        self._report_dir = report_dir
        self._finished: CompileCounts | None = None
        self._meter = CompileMeter().start()

    def counts(self) -> CompileCounts:
        """Graphs that this rank compiled since step 1.

        Returns
        -------
        CompileCounts
            Forward (with inference) and backward graphs, cache hits, misses.
        """
        return self._finished or self._meter.read()

    def finish(self, timeout_s: float = 30.0) -> int | None:
        """End counting, and tell rank 0.

        No collective. Rank 0 waits for the others, these return at once; a
        rank that does not come in time leaves the total unknown (None).

        Parameters
        ----------
        timeout_s
            How long rank 0 waits.

        Returns
        -------
        int or None
            On rank 0 the graphs compiled by all ranks, elsewhere by this one;
            None where that is not known.
        """
        if self._finished is not None:
            return self._report.compiled_after_start
        self._finished = self._meter.stop()
        own = self._finished.total if self._meter.complete else None
        report = self._report
        rank = 0 if self._group is None else self._group.rank()
        counted: dict[int, int | None] = {rank: own}
        if report.world_size > 1:
            try:
                counted.update(self._exchange(own, timeout_s))
            except RuntimeError as error:  # the Store is gone: training is over
                _log.warning("deepmd-prewarm: cannot count on all ranks: %s", error)
                report.compiled_after_start = None
                return None
        for record in report.ranks:
            record.compiled_after_start = counted.get(record.rank)
        totals = [count for count in counted.values() if count is not None]
        wanted = report.world_size if rank == 0 else 1
        report.compiled_after_start = sum(totals) if len(totals) == wanted else None
        if rank == 0 and self._report_dir is not None:
            report.write(self._report_dir)
        return report.compiled_after_start

    def _exchange(self, own: int | None, timeout_s: float) -> dict[int, int | None]:
        assert self._group is not None
        exchange = RecordExchange(self._group, "compiled_after_start")
        exchange.publish("" if own is None else str(own))
        if exchange.rank != 0:
            return {}
        return {
            rank: int(text) if text else None
            for rank, text in exchange.collect(timeout_s).items()
        }
