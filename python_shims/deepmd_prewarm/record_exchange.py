# SPDX-License-Identifier: LGPL-3.0-or-later
"""Ranks' records, brought to rank 0 over the group's Store: no collective.

Each rank writes its own keys only, rank 0 alone reads them. Keys carry
torchrun's run id and restart count and a round, so that neither a dead attempt
nor an earlier call is read.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import defaultdict

import torch.distributed as dist

__all__ = ["RecordExchange"]

# A TCPStore value of more than 8 MiB resets the connection for good.
_LARGEST = 4 << 20
_rounds: dict[tuple[str, str], int] = defaultdict(int)


class RecordExchange:
    """One round of bringing one text from each rank to rank 0.

    Parameters
    ----------
    group
        The group; all its ranks make an exchange of this purpose in the same
        order.
    purpose
        What is brought, part of the keys.
    """

    def __init__(self, group: dist.ProcessGroup, purpose: str) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._store = group.get_group_store()
        number = _rounds[group.group_name, purpose]
        _rounds[group.group_name, purpose] += 1
        self._scope = "/".join(
            [
                "deepmd_prewarm",
                os.environ.get("TORCHELASTIC_RUN_ID", ""),
                os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
                purpose,
                str(number),
            ]
        )

    def publish(self, text: str) -> None:
        """Write this rank's text.

        Parameters
        ----------
        text
            What rank 0 shall read, of any length.
        """
        packed = zlib.compress(text.encode(), 6)
        parts = [packed[i : i + _LARGEST] for i in range(0, len(packed), _LARGEST)] or [
            b""
        ]
        for number, part in enumerate(parts):
            self._store.set(f"{self._scope}/{self.rank}/part{number}", part)
        # Last, so that whoever sees it can read the rest without waiting.
        self._store.set(f"{self._scope}/{self.rank}", str(len(parts)))

    def collect(self, timeout_s: float) -> dict[int, str]:
        """Read and delete what came, on rank 0.

        Parameters
        ----------
        timeout_s
            How long to wait for ranks that have not published yet.

        Returns
        -------
        dict
            Text of each rank that published in time.
        """
        end = time.monotonic() + timeout_s
        texts: dict[int, str] = {}
        pause = 0.002
        waiting = list(range(self.size))
        while True:
            came = [r for r in waiting if self._store.check([f"{self._scope}/{r}"])]
            for rank in came:
                texts[rank] = self._take(rank)
            waiting = [r for r in waiting if r not in texts]
            if not waiting or time.monotonic() >= end:
                return dict(sorted(texts.items()))
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def _take(self, rank: int) -> str:
        key = f"{self._scope}/{rank}"
        count = int(self._store.get(key))
        names = [f"{key}/part{number}" for number in range(count)]
        packed = b"".join(self._store.get(name) for name in names)
        for name in (*names, key):
            self._store.delete_key(name)
        return zlib.decompress(packed).decode()
