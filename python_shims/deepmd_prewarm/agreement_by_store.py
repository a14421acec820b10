# SPDX-License-Identifier: LGPL-3.0-or-later
"""What ranks can agree on from Python alone, when the library is missing."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from typing import Any

import torch.distributed as dist

_rounds: dict[tuple[str, int, int], int] = defaultdict(int)
_groups: dict[str, dist.ProcessGroup] = {}  # torch's registry holds them weakly


def group_name_of(group: dist.ProcessGroup | str | None) -> str | None:
    """Return a group's name, or None where there is nobody to meet.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or str, optional
        A group, its name, or None for the default group.

    Returns
    -------
    str or None
        None if torch.distributed is unavailable or not initialised, for a
        group of one rank, and for a group that this process is no member of.
    """
    if isinstance(group, str):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or group.size() <= 1:
        return None
    return str(group.group_name)


def group_over_store(store: dist.Store, rank: int, world_size: int, name: str) -> str:
    """Make a group that can only meet, over a Store of your own.

    For ranks that have a Store but no process group (yet).

    Parameters
    ----------
    store : torch.distributed.Store
        The Store all these ranks share.
    rank, world_size : int
        This rank, and how many there are.
    name : str
        A name that no other group of this process has.

    Returns
    -------
    str
        `name`, to be passed as `group`.
    """
    from torch._C._distributed_c10d import _register_process_group

    store = dist.PrefixStore(f"deepmd_prewarm_group/{name}", store)
    _groups[name] = dist.ProcessGroup(store, rank, world_size)
    _register_process_group(name, _groups[name])
    return name


def agree_to_degrade(
    group: dist.ProcessGroup | str | None, problem: str | None
) -> list[str]:
    """Tell all ranks whether the plugin works here; learn where it does not.

    Needs nothing but the group's Store, so it also works where the library
    cannot be loaded. All ranks call it, all get the same answer. Blocks until
    all came, at most ``DP_PREWARM_ARRIVE_S`` seconds (600).

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or str, optional
        Whom to ask. Default: all ranks.
    problem : str, optional
        Why the plugin cannot work on this rank.

    Returns
    -------
    list of str
        ``"rank 1: <problem>"`` for each rank with a problem, in rank order;
        empty: the plugin works everywhere.

    Raises
    ------
    RuntimeError
        If ranks do not come in time; it names them.
    """
    name = group_name_of(group)
    if name is None:
        return [f"rank 0: {problem}"] if problem else []
    from torch._C._distributed_c10d import _resolve_process_group

    members = _resolve_process_group(name)
    rank, size = members.rank(), members.size()
    store = _own_connection(members.get_group_store())
    number = _rounds[name, rank, size]
    _rounds[name, rank, size] += 1
    scope = "/".join(
        [
            "deepmd_prewarm",
            os.environ.get("TORCHELASTIC_RUN_ID", ""),
            os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
            f"{size}",
            "degrade",
        ]
    )
    store.set(f"{scope}/{number}/{rank}", json.dumps((problem or "")[:65536]))
    limit = float(os.environ.get("DP_PREWARM_ARRIVE_S") or 600)
    end = time.monotonic() + limit
    if rank == 0:
        keys = [f"{scope}/{number}/{r}" for r in range(size)]
        answers = [_polled(store, key, end) for key in keys]
        missing = [r for r, answer in enumerate(answers) if answer is None]
        problems = [f"rank {r}: {text}" for r, text in enumerate(answers) if text]
        verdict: Any = {"missing": missing, "problems": problems}
        store.set(f"{scope}/{number}/verdict", json.dumps(verdict))
    else:
        verdict = _polled(store, f"{scope}/{number}/verdict", end + 10)
        if verdict is None:
            verdict = {"missing": [0], "problems": []}
    if number:
        store.delete_key(f"{scope}/{number - 1}/{rank}")
    if number > 1 and rank == 0:
        store.delete_key(f"{scope}/{number - 2}/verdict")
    if verdict["missing"]:
        ranks = " ".join(map(str, verdict["missing"]))
        raise RuntimeError(
            f"agree_to_degrade: all {size} ranks must come within {limit:g} s "
            f"(DP_PREWARM_ARRIVE_S), missing: rank {ranks}. Look for what ended "
            "or delays them."
        )
    return list(verdict["problems"])


def _own_connection(store: dist.Store) -> dist.Store:
    # A request on a client that sits in another thread's wait would block.
    try:
        return store.clone()
    except (NotImplementedError, RuntimeError):
        return store


def _polled(store: dist.Store, key: str, end: float) -> Any:
    pause = 0.002
    while not store.check([key]):
        if time.monotonic() > end:
            return None
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    return json.loads(store.get(key))
