# SPDX-License-Identifier: LGPL-3.0-or-later
"""Other ranks' heartbeats, read from Python: no library needed to read them.

The native thread of a rank writes ``beat/<rank>`` into the group's Store (see
``plugin/rank_record.h``). Where ranks have to agree without the library, those
beats still tell a slow rank from a dead one.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

__all__ = ["Beat", "SignsOfLife", "scope_of"]

_FORMAT = "1"
# A look that comes later than this says more about the reader than the writer.
_LONGEST_LOOK_S = 1.0
_GRACE_S = 5.0


def scope_of(size: int) -> str:
    """Name what all keys of a group start with; as in ``plugin/rank_state.cpp``.

    Parameters
    ----------
    size
        Number of ranks of the group.

    Returns
    -------
    str
        Without a slash at the end.
    """
    return f"deepmd_prewarm/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{size}"


@dataclass(frozen=True)
class Beat:
    """The fields of a heartbeat that matter here."""

    host: str
    place: str
    pid: str
    phase: str
    period_s: float
    left: bool
    dead: bool
    written_ms: int

    @classmethod
    def parse(cls, value: bytes) -> Beat | None:
        """Read what ``RankRecord::packed`` wrote.

        Parameters
        ----------
        value
            ``<length>:<field>`` for each field.

        Returns
        -------
        Beat or None
            None for another format.
        """
        fields: list[str] = []
        try:
            while value:
                size, _, rest = value.partition(b":")
                fields.append(rest[: int(size)].decode(errors="replace"))
                value = rest[int(size) :]
            if fields[0] != _FORMAT:
                return None
            return cls(
                host=fields[3],
                place=fields[4],
                pid=fields[5],
                phase=fields[7],
                period_s=int(fields[9]) / 1000,
                left=fields[14] == "1",
                dead=fields[15] == "1",
                written_ms=int(fields[18]),
            )
        except (IndexError, ValueError):
            return None


class SignsOfLife:
    """What ranks that one waits for have been seen doing.

    Parameters
    ----------
    store
        The group's Store.
    size
        Number of ranks of the group.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store = store
        self._scope = scope_of(size)
        beat_s = float(os.environ.get("DP_PREWARM_BEAT_S") or 1)
        self._beat_s = beat_s
        self._dead_s = float(os.environ.get("DP_PREWARM_DEAD_S") or 5 * beat_s)
        self._arrive_s = float(os.environ.get("DP_PREWARM_ARRIVE_S") or 600)
        self._since_ms = _own_start_ms()
        self._place = _place()
        self._values: dict[int, bytes] = {}
        self._alive: set[int] = set()
        self._silent_s: dict[int, float] = {}
        self._unseen_s: dict[int, float] = {}
        self._looked: dict[int, float] = {}

    def look(self, rank: int) -> str | None:
        """Look at a rank's beat; call it about once a second while waiting.

        Parameters
        ----------
        rank
            Whom to look at.

        Returns
        -------
        str or None
            Why it will not come any more; None: it may.
        """
        now = time.monotonic()
        passed = min(now - self._looked.get(rank, now), _LONGEST_LOOK_S)
        self._looked[rank] = now
        key = f"{self._scope}/beat/{rank}"
        value = self._store.get(key) if self._store.check([key]) else b""
        beat = Beat.parse(value)
        changed = rank in self._values and value != self._values[rank]
        self._values[rank] = value
        if beat is None:
            return self._unseen(rank, passed)
        if changed or (
            beat.place == self._place != "" and beat.written_ms >= self._since_ms
        ):
            self._alive.add(rank)
        if rank not in self._alive:  # perhaps what an earlier job left
            return self._unseen(rank, passed)
        name = f' in "{beat.phase}" (host {beat.host}, pid {beat.pid})'
        if beat.dead:
            return f"rank {rank}{name}: its process ended"
        if beat.left:
            return f"rank {rank}{name}: it left"
        silent = 0.0 if changed else self._silent_s.get(rank, 0.0) + passed
        self._silent_s[rank] = silent
        if silent > self._dead_s * max(1.0, beat.period_s / self._beat_s):
            return f"rank {rank}{name}: no heartbeat for {silent:.0f} s"
        return None

    def heard(self, rank: int) -> None:
        """Count a message of a rank that need not beat as a sign of life.

        What it decides on others reaches this rank before its own time is over.

        Parameters
        ----------
        rank
            Who wrote.
        """
        self._unseen_s[rank] = -_GRACE_S

    def _unseen(self, rank: int, passed: float) -> str | None:
        unseen = self._unseen_s.get(rank, 0.0) + passed
        self._unseen_s[rank] = unseen
        if unseen < self._arrive_s:
            return None
        return (
            f"rank {rank}: no sign of life in {self._arrive_s:g} s"
            " (DP_PREWARM_ARRIVE_S)"
        )


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _own_start_ms() -> int:
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) * 1000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 1 << 62
