# SPDX-License-Identifier: LGPL-3.0-or-later
"""How many graphs torch compiled, and for how long: the only place that asks.

Dynamo, AOTAutograd and Inductor keep private counters; none of them alone sees
everything (measured on torch 2.11):

===================  ========  ===========  ==========  =================
what compiles        Dynamo    AOTAutograd  FX cache    callback
===================  ========  ===========  ==========  =================
forward, inference   yes       yes          Inductor    ``DYNAMO``
backward, eagerly    no        no           Inductor    no
backward, lazily     no        no           Inductor    ``LAZY_BACKWARD``
===================  ========  ===========  ==========  =================

A name that upstream moved is reported by one warning, and what it would have
counted reads as ``complete = False``: never silently as zero.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CompileCounts", "CompileMeter", "CompileSpan"]

_log = logging.getLogger(__name__)

_FX_CACHE = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")


@dataclass(frozen=True)
class CompileCounts:
    """Graphs compiled in an interval, and where Inductor's code came from."""

    #: graphs handed to a backend by Dynamo: training forwards and inference
    forward: int = 0
    #: backward graphs, compiled with their forward or lazily
    backward: int = 0
    #: Inductor graphs found in the FX graph cache
    cache_hits: int = 0
    #: Inductor graphs not found there (or not cacheable), so compiled
    cache_misses: int = 0

    @property
    def total(self) -> int:
        """Forward, inference and backward graphs together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class CompileSpan:
    """One stretch of compiling, in seconds of `time.perf_counter`."""

    start: float
    end: float
    #: every Inductor graph of it came out of the FX graph cache
    loaded: bool


@dataclass(frozen=True)
class _Reading:
    graphs: int = 0
    aot: int = 0
    hits: int = 0
    misses: int = 0

    def since(self, earlier: _Reading) -> _Reading:
        # A counter that went down was cleared by somebody in between.
        return _Reading(
            *(
                a - b if a >= b else a
                for a, b in zip(_flat(self), _flat(earlier), strict=True)
            )
        )

    def plus(self, other: _Reading) -> _Reading:
        return _Reading(
            *(a + b for a, b in zip(_flat(self), _flat(other), strict=True))
        )


def _flat(reading: _Reading) -> tuple[int, int, int, int]:
    return reading.graphs, reading.aot, reading.hits, reading.misses


class _Upstream:
    """The private names, looked up once, each missing one named once."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self._counters: Mapping[str, Mapping[str, int]] | None = self._find(
            "torch._dynamo.utils.counters",
            lambda: __import__("torch._dynamo.utils", fromlist=["_"]).counters,
        )
        self.callbacks: Any = self._find(
            "torch._dynamo.callback.callback_handler",
            lambda: (
                __import__("torch._dynamo.callback", fromlist=["_"]).callback_handler
            ),
        )
        if self.callbacks is not None:
            for name in ("register_start_callback", "register_end_callback"):
                if not hasattr(self.callbacks, name):
                    self.missing.append(f"callback_handler.{name}")
                    self.callbacks = None
                    break
        if self.missing:
            _log.warning(
                "deepmd-prewarm: torch %s no longer has %s; graphs compiled from"
                " step 1 on cannot be counted completely. Please report this.",
                torch.__version__,
                ", ".join(self.missing),
            )

    def _find(self, name: str, look_up: Callable[[], Any]) -> Any:
        try:
            return look_up()
        except (ImportError, AttributeError):
            self.missing.append(name)
            return None

    def read(self) -> _Reading:
        if self._counters is None:
            return _Reading()
        # counters is a defaultdict of Counters: reading adds no key of ours
        # that torch would mind.
        inductor = self._counters["inductor"]
        return _Reading(
            graphs=self._counters["stats"]["unique_graphs"],
            aot=self._counters["aot_autograd"]["ok"],
            hits=inductor[_FX_CACHE[0]],
            misses=inductor[_FX_CACHE[1]] + inductor[_FX_CACHE[2]],
        )


_upstream_lock = threading.Lock()
_upstream: _Upstream | None = None


def _torch_names() -> _Upstream:
    global _upstream
    with _upstream_lock:
        if _upstream is None:
            _upstream = _Upstream()
        return _upstream


@dataclass(eq=False)
class CompileMeter:
    """Counts and times what compiles between `start` and `stop`.

    Process-wide, as torch's own counters are: what another thread compiles is
    counted too. Meters nest. Costs nothing while nothing compiles.
    """

    spans: list[CompileSpan] = field(default_factory=list)
    _begun: _Reading | None = None
    _last: _Reading = field(default_factory=_Reading)
    _sum: _Reading = field(default_factory=_Reading)
    _lazy_backward: int = 0
    _span_start: float | None = None
    _span_reading: _Reading = field(default_factory=_Reading)
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def complete(self) -> bool:
        """False where torch moved a name that counting needs."""
        return not _torch_names().missing

    def start(self) -> CompileMeter:
        """Count from now on.

        Returns
        -------
        CompileMeter
            The meter itself.
        """
        names = _torch_names()
        self._last = self._begun = names.read()
        self.listen()
        return self

    def listen(self) -> None:
        """Register the callbacks again: `torch._dynamo.reset` drops them all."""
        handler = _torch_names().callbacks
        if handler is None or self._begun is None:
            return
        if self._on_start not in handler.start_callbacks:
            handler.register_start_callback(self._on_start)
        if self._on_end not in handler.end_callbacks:
            handler.register_end_callback(self._on_end)

    def stop(self) -> CompileCounts:
        """End counting.

        Returns
        -------
        CompileCounts
            What compiled since `start`.
        """
        counts = self.read()
        handler = _torch_names().callbacks
        if handler is not None:
            for callbacks, mine in (
                (handler.start_callbacks, self._on_start),
                (handler.end_callbacks, self._on_end),
            ):
                if mine in callbacks:
                    callbacks.remove(mine)
        return counts

    def read(self) -> CompileCounts:
        """Read what compiled since `start`, without ending.

        Returns
        -------
        CompileCounts
            Counts so far.
        """
        with self._lock:
            self._absorb()
            done, lazy = self._sum, self._lazy_backward
        forward = max(done.graphs, done.aot)
        inductor = done.hits + done.misses
        return CompileCounts(
            forward=forward,
            backward=max(lazy, inductor - forward, 0),
            cache_hits=done.hits,
            cache_misses=done.misses,
        )

    def _absorb(self) -> None:
        if self._begun is not None:
            now = _torch_names().read()
            self._sum = self._sum.plus(now.since(self._last))
            self._last = now

    # torch holds a plain lock while it calls these two: no compile, no I/O.
    def _on_start(self, args: Any) -> None:
        with self._lock:
            self._absorb()
            self._span_start = time.perf_counter()
            self._span_reading = self._last
            if getattr(args.callback_trigger, "name", "") == "LAZY_BACKWARD":
                self._lazy_backward += 1

    def _on_end(self, args: Any) -> None:
        with self._lock:
            self._absorb()
            if self._span_start is None:
                return
            made = self._last.since(self._span_reading)
            self.spans.append(
                CompileSpan(
                    self._span_start,
                    time.perf_counter(),
                    loaded=made.hits > 0 and made.misses == 0,
                )
            )
            self._span_start = None
