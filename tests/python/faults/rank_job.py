# SPDX-License-Identifier: LGPL-3.0-or-later
"""Start ranks as processes, let one fail, and learn what the others raised.

A fork server imports torch once, so that a job of three ranks starts in a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import rank_entry

sys.path.insert(0, str(Path(__file__).parents[1]))
import fresh_process

PATIENCE_S = 120.0


def context() -> ForkServerContext:
    """Give the fork server that `fresh_process` uses: a process has only one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return fresh_process.context()


@dataclass
class Said:
    """What a rank said last, and when (monotonic clock)."""

    at: float
    words: tuple[Any, ...]


@dataclass
class Job:
    """Ranks 0..world-1 and a host of their Store, each a process."""

    world: int
    options: dict[str, Any] = field(default_factory=dict)
    patience_s: float = PATIENCE_S

    def __enter__(self) -> Job:
        server = context()
        self.store_pipe, there = server.Pipe()
        self.store = server.Process(target=rank_entry.host_store, args=(there,))
        self.store.start()
        there.close()
        port = self.store_pipe.recv()
        self.pipes, self.ranks = [], []
        for rank in range(self.world):
            here, there = server.Pipe()
            process = server.Process(
                target=rank_entry.rank_main,
                args=(there, rank, self.world, port, self.options),
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.ranks.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send("end")
        end = time.monotonic() + 10.0
        self.exit_codes = []
        for process in self.ranks:
            process.join(max(0.0, end - time.monotonic()))
            self.exit_codes.append(process.exitcode)
            with contextlib.suppress(OSError):
                process.kill()
            process.join()
        self.store.kill()
        self.store.join()

    def hear(self, rank: int, word: str) -> Said:
        """Wait until a rank says `word`; skips what it says before that."""
        end = time.monotonic() + self.patience_s
        while self.pipes[rank].poll(max(0.0, end - time.monotonic())):
            at, *words = self.pipes[rank].recv()
            if words[0] == word:
                return Said(at, tuple(words))
            if words[0] in ("raised", "passed"):
                raise AssertionError(f"rank {rank}: expected {word!r}, got {words}")
        raise AssertionError(f"rank {rank}: nothing heard in {self.patience_s} s")

    def outcome(self, rank: int) -> Said:
        """Wait until a rank says how its phase or meeting ended."""
        end = time.monotonic() + self.patience_s
        while self.pipes[rank].poll(max(0.0, end - time.monotonic())):
            at, *words = self.pipes[rank].recv()
            if words[0] in ("raised", "passed"):
                return Said(at, tuple(words))
        raise AssertionError(f"rank {rank}: no outcome in {self.patience_s} s")

    def tell(self, rank: int, order: str) -> float:
        self.pipes[rank].send(order)
        return time.monotonic()

    def kill(self, rank: int, number: signal.Signals) -> float:
        os.kill(self.ranks[rank].pid or 0, number)
        return time.monotonic()

    def kill_store(self) -> float:
        self.store.kill()
        return time.monotonic()


@dataclass
class Fault:
    """How one or two ranks of a job fail.

    ``orders`` go to ranks while they compile; ``signals`` may hit a rank that
    compiles or one that waits.
    """

    orders: dict[int, str] = field(default_factory=dict)
    signals: dict[int, signal.Signals] = field(default_factory=dict)
    store_dies: bool = False
    prewarm: bool = False

    @property
    def victims(self) -> set[int]:
        return {*self.orders, *self.signals}


@dataclass
class Outcome:
    """What every rank that could still speak raised, and how long after."""

    survivors: dict[int, Said]
    victims: dict[int, Said]
    fault_at: float
    exit_codes: list[int | None]

    @property
    def texts(self) -> set[str]:
        return {said.words[-1] for said in self.survivors.values()}

    @property
    def text(self) -> str:
        assert len(self.texts) == 1, self.texts
        return next(iter(self.texts))

    def seconds(self, rank: int) -> float:
        return self.survivors[rank].at - self.fault_at


def run_fault(
    fault: Fault,
    moment: str,
    *,
    world: int = 3,
    environment: dict[str, str] | None = None,
    speaking_victims: tuple[int, ...] = (),
    patience_s: float = PATIENCE_S,
    **options: Any,
) -> Outcome:
    """Run a job in which ranks fail at a moment of the others.

    Parameters
    ----------
    fault
        Who fails, and how.
    moment
        ``"compiling"``: nobody is at the meeting yet; ``"waiting"``: the others
        wait there, and a rank hit by a signal does too; ``"after"``: just after
        a verdict, before anybody knows.
    speaking_victims
        Victims that raise or pass, too.
    patience_s
        How long to wait for anything.
    """
    options |= {"environment": environment or {}, "prewarm": fault.prewarm}
    options["after_verdict"] = moment == "after"
    with Job(world, options, patience_s) as job:
        survivors = [r for r in range(world) if r not in fault.victims]
        if moment == "after":
            for rank in range(world):
                job.hear(rank, "first passed")
        else:
            for rank in range(world):
                job.hear(rank, "compiling")
        late: list[int] = []
        if moment == "waiting":
            # Somebody has to be missing while a victim waits, or all would pass.
            if fault.signals or fault.store_dies:
                late = [survivors.pop()]
            for rank in [*survivors, *fault.signals]:
                if rank not in fault.orders:
                    job.tell(rank, "meet")
            for rank in survivors:
                job.hear(rank, "meeting")
            # "meeting" is said a moment before: let the arrival be written.
            time.sleep(0.2)
        fault_at = time.monotonic()
        for rank, order in fault.orders.items():
            fault_at = job.tell(rank, order)
        for rank, number in fault.signals.items():
            fault_at = job.kill(rank, number)
        if fault.store_dies:
            fault_at = job.kill_store()
        said = {}
        if moment != "waiting":
            for rank in survivors:
                job.tell(rank, "meet")
        for rank in survivors:
            said[rank] = job.outcome(rank)
        for rank in late:
            job.tell(rank, "meet")
            said[rank] = job.outcome(rank)
        for rank, number in fault.signals.items():
            if number == signal.SIGSTOP:
                job.kill(rank, signal.SIGCONT)
                if moment != "waiting":
                    job.tell(rank, "meet")
        victims = {rank: job.outcome(rank) for rank in speaking_victims}
    return Outcome(said, victims, fault_at, job.exit_codes)
