# SPDX-License-Identifier: LGPL-3.0-or-later
"""Meetings of many ranks: time, Store requests, CPU of heartbeats.

Ranks are threads of one process over one TCPStore, so the Store's server, all
native threads and all meeting threads share this machine's cores. Connecting is
measured by itself, as heartbeats do it when the group is made: c10d asks the
resolver for the host name of each connection, one after the other. Exit code 0 if
64 ranks agree in under 0.5 s and 512 in under 5 s, the first time and later
(median), and a heartbeat costs under 0.5 % of a core per rank.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from deepmd_prewarm import _library
from rank_threads import make_ranks

LIMITS_S = {64: 0.5, 512: 5.0}
HEARTBEAT_LIMIT = 0.005
ROUNDS = 5


class Crowd:
    """Ranks as threads, which meet again and again."""

    def __init__(self, size: int) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = make_ranks(size, lambda rank: store)

    def requests(self) -> list[int]:
        """Requests of each rank so far."""
        return [_library.bridge().requests_sent(me.name) for me in self.ranks]

    def connect(self) -> float:
        """All start their heartbeats; seconds until each has sent some."""
        begin = time.perf_counter()
        self._all(_library.bridge().start_beats)
        while min(self.requests()) < 3:
            time.sleep(0.01)
        return time.perf_counter() - begin

    def meet(self) -> float:
        """All meet; seconds from the first one's coming to the last one's leaving."""
        return self._all(
            lambda name: torch.ops.deepmd.sync_ranks(name, "bench", "", 0.0)
        )

    def _all(self, call: Callable[[str], object]) -> float:
        ready = threading.Barrier(len(self.ranks) + 1)
        failed = []

        def body(name: str) -> None:
            ready.wait()
            try:
                call(name)
            except RuntimeError as error:
                failed.append(error)

        threads = [threading.Thread(target=body, args=(m.name,)) for m in self.ranks]
        for thread in threads:
            thread.start()
        ready.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
        assert not failed, failed[0]
        return time.perf_counter() - begin


def measure(size: int, idle_s: float) -> bool:
    """Print one line for this number of ranks; whether it is fast enough."""
    crowd = Crowd(size)
    connected = crowd.connect()
    first = crowd.meet()
    later = [crowd.meet() for _ in range(ROUNDS)]
    # From here on each waiting thread looks for Ctrl-C under the GIL: costly only
    # where ranks are threads of one interpreter.
    before = crowd.requests()
    for _ in range(ROUNDS):
        crowd.meet()
    after = crowd.requests()
    rounds = [(b - a) / ROUNDS for a, b in zip(before, after, strict=True)]
    time.sleep(1.5)  # the meeting's last polls
    cpu = _cpu_s()
    begin, before = time.perf_counter(), crowd.requests()
    time.sleep(idle_s)
    seconds = time.perf_counter() - begin
    cpu = (_cpu_s() - cpu) / seconds / size
    after = crowd.requests()
    idle = [(b - a) / seconds for a, b in zip(before, after, strict=True)]
    _library.bridge().leave_all(5.0)
    median = statistics.median(later)
    limit = LIMITS_S.get(size)
    good = (limit is None or max(first, median) < limit) and cpu < HEARTBEAT_LIMIT
    print(
        f"{size:>5} ranks: connected in {connected:6.3f} s,"
        f" first meeting {first:6.3f} s, then median {median:6.3f} s,"
        f" worst {max(later):6.3f} s"
        f" | requests a meeting: leader {max(rounds):5.1f},"
        f" others {statistics.median(rounds):4.1f}"
        f" | beating: leader {max(idle):4.1f}/s,"
        f" others {statistics.median(idle):4.1f}/s,"
        f" {100 * cpu:.3f} % of a core per rank (Store's server included)"
        f"{'' if good else '   <-- too slow'}",
        flush=True,
    )
    return good


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Measure each size in a process of its own; 0 if all limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--idle", type=float, default=10.0, help="seconds of beats")
    options = parser.parse_args()
    if len(options.ranks) == 1:
        _library.load()
        return 0 if measure(options.ranks[0], options.idle) else 1
    command = [sys.executable, __file__, "--idle", str(options.idle), "--ranks"]
    return max(subprocess.call([*command, str(size)]) for size in options.ranks)


if __name__ == "__main__":
    sys.exit(main())
