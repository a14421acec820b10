# SPDX-License-Identifier: LGPL-3.0-or-later
"""A rank of `two_hosts`: ``host_rank.py RANK STORE PORT``, orders on stdin.

Rank 0 hosts the Store where PORT is 0, and says which port it got.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch.distributed as dist
from deepmd_prewarm import agreement


def main() -> None:
    """Say what happens, one JSON object a line."""
    rank, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    store = dist.TCPStore(
        host, port, is_master=rank == 0, wait_for_workers=False, use_libuv=True
    )
    group = agreement.group_over_store(store, rank, 2, "pair")
    agreement.watch(group)
    _say(port=store.port, pid=os.getpid(), space=os.readlink("/proc/self/ns/pid"))
    for line in sys.stdin:
        kind, _, phase = line.strip().partition(" ")
        if kind == "enter":
            agreement.entering(phase)
            continue
        _say(meeting=phase)
        try:
            agreement.agree(phase, group=group)
        except RuntimeError as error:
            _say(raised=str(error))
        else:
            _say(raised=None)


def _say(**words: object) -> None:
    print(json.dumps({"at": time.monotonic(), **words}), flush=True)


if __name__ == "__main__":
    main()
