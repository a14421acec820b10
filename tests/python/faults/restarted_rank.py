# SPDX-License-Identifier: LGPL-3.0-or-later
"""A rank that fails in torchrun's first attempt, at a moment of the other rank.

Keys of the first attempt stay in the Store: torchrun's agent hosts it, and the
group is made over it without torch's own prefix for each attempt.
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist
from deepmd_prewarm import agreement


def main(moment: str) -> None:
    """Meet; in attempt 0 rank 1 announces an error and exits with 1."""
    rank = int(os.environ["RANK"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    group = agreement.group_over_store(store, rank, 2, "pair")
    agreement.watch(group)
    agreement.agree("first", group=group)
    fails = attempt == 0 and rank == 1
    try:
        if moment == "after" and fails:
            os._exit(1)
        if moment == "waiting" and fails:
            _wait_for_rank_0(store)
        with agreement.together("compile b", group):
            if fails:
                raise ValueError("an error of attempt 0")
            if moment == "compiling" and attempt == 0:
                _wait_for_rank_1(store)
    except (RuntimeError, ValueError) as error:
        print(f"attempt {attempt} rank {rank}: {error!r}", flush=True)
        sys.exit(1)
    print(f"attempt {attempt} rank {rank}: passed", flush=True)


def _wait_for_rank_0(store: dist.Store) -> None:
    store.wait(["deepmd_prewarm_group/pair/" + _key("lead")])
    while b"compile b" not in store.get("deepmd_prewarm_group/pair/" + _key("beat/0")):
        time.sleep(0.02)


def _wait_for_rank_1(store: dist.Store) -> None:
    store.wait(["deepmd_prewarm_group/pair/" + _key("text/1")])


def _key(name: str) -> str:
    return f"deepmd_prewarm/{os.environ['TORCHELASTIC_RUN_ID']}/2/{name}"


if __name__ == "__main__":
    main(sys.argv[1])
