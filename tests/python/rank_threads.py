# SPDX-License-Identifier: LGPL-3.0-or-later
"""Ranks as threads of one process that share a Store; no collective can run."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepmd_prewarm.signs_of_life import Beat, scope_of
from torch._C._distributed_c10d import _register_process_group

_numbers = itertools.count()


@dataclass
class Rank:
    """One rank: its group, and the name under which it is registered."""

    rank: int
    group: dist.ProcessGroup
    name: str


def make_ranks(
    size: int, store: Callable[[int], dist.Store] | dist.Store | None = None
) -> list[Rank]:
    """Make the ranks of a new group over one Store (default: a HashStore)."""
    number = next(_numbers)
    shared = dist.HashStore() if store is None else store
    ranks = []
    for rank in range(size):
        own = shared(rank) if callable(shared) else shared
        name = f"threads {number} rank {rank}"
        group = dist.ProcessGroup(own, rank, size)
        _register_process_group(name, group)
        ranks.append(Rank(rank, group, name))
    return ranks


@dataclass
class Raised:
    """What a rank's thread ended with."""

    error: BaseException | None

    @property
    def text(self) -> str:
        return "" if self.error is None else str(self.error)

    @property
    def trace(self) -> str:
        return "".join(traceback.format_exception(self.error)) if self.error else ""


def on_ranks(ranks: list[Rank], body: Callable[[Rank], Any]) -> list[Raised]:
    """Run `body` for each rank at once; what each raised."""
    raised = [Raised(None) for _ in ranks]

    def run(place: int, rank: Rank) -> None:
        try:
            body(rank)
        except BaseException as error:
            raised[place] = Raised(error)

    threads = [
        threading.Thread(target=run, args=(place, rank), daemon=True)
        for place, rank in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    return raised


def beat_of(store: dist.Store, rank: int, size: int) -> Beat | None:
    """Read a rank's heartbeat from the Store."""
    key = f"{scope_of(size)}/beat/{rank}"
    return Beat.parse(store.get(key)) if store.check([key]) else None


def wait_for_beat(
    store: dist.Store, rank: int, size: int, fits: Callable[[Beat], bool]
) -> Beat:
    """Wait until a rank's heartbeat says what it should."""
    pause = threading.Event()
    for _ in range(3000):
        beat = beat_of(store, rank, size)
        if beat is not None and fits(beat):
            return beat
        pause.wait(0.02)
    raise AssertionError(f"rank {rank} never sent such a beat; the last: {beat}")
