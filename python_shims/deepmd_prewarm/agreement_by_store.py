# SPDX-License-Identifier: LGPL-3.0-or-later
"""What ranks can agree on from Python alone, when the library is missing."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .signs_of_life import SignsOfLife, scope_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOK_S = 1.0
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
    all came; a rank whose native thread beats is waited for, however slow, one
    that does not beat for ``DP_PREWARM_ARRIVE_S`` seconds (600).

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
        If a rank died, or none of it was seen in time; it names them.
    """
    name = group_name_of(group)
    if name is None:
        return [f"rank 0: {problem}"] if problem else []
    from torch._C._distributed_c10d import _resolve_process_group

    members = _resolve_process_group(name)
    rank, size = members.rank(), members.size()
    store = _own_connection(members.get_group_store())
    answer = {"nonce": uuid.uuid4().hex, "problem": (problem or "")[:65536]}
    if rank == 0:
        verdict = _collect(store, size, answer)
    else:
        verdict = _answer(store, rank, size, answer)
    if verdict["dead"]:
        raise RuntimeError(
            f"agree_to_degrade: all {size} ranks must come, got no answer of "
            + "; ".join(verdict["dead"])
            + ". Look for the first error there."
        )
    return list(verdict["problems"])


def _collect(store: dist.Store, size: int, answer: dict[str, str]) -> Any:
    # A nonce for each call: what an earlier call, group or attempt left under
    # the same keys is never taken for an answer to this one.
    scope = f"{scope_of(size)}/degrade"
    store.set(f"{scope}/0", json.dumps({**answer, "to": ""}))
    signs = SignsOfLife(store, size)
    answers = {0: answer}
    dead: list[str] = []
    pauses = _pauses(size)
    looked = time.monotonic()
    while len(answers) < size and not dead:
        for rank in range(1, size):
            if rank not in answers and store.check([f"{scope}/{rank}"]):
                found = json.loads(store.get(f"{scope}/{rank}"))
                if found["to"] == answer["nonce"]:
                    answers[rank] = found
        if time.monotonic() - looked >= _LOOK_S:
            looked = time.monotonic()
            looks = [signs.look(rank) for rank in range(size) if rank not in answers]
            dead = [why for why in looks if why]
        if len(answers) < size and not dead:
            time.sleep(next(pauses))
    verdict = {
        "to": {str(rank): found["nonce"] for rank, found in answers.items()},
        "dead": dead,
        "problems": [
            f"rank {rank}: {found['problem']}"
            for rank, found in sorted(answers.items())
            if found["problem"]
        ],
    }
    store.set(f"{scope}/verdict", json.dumps(verdict))
    return verdict


def _answer(store: dist.Store, rank: int, size: int, answer: dict[str, str]) -> Any:
    scope = f"{scope_of(size)}/degrade"
    signs = SignsOfLife(store, size)
    told = b""
    pauses = _pauses(size)
    looked = time.monotonic()
    while True:
        asks = store.get(f"{scope}/0") if store.check([f"{scope}/0"]) else b""
        # In this order: rank 0 asks anew only after its verdict, so what is read
        # now is the verdict on our answer if `asks` is already the next call's.
        if store.check([f"{scope}/verdict"]):
            verdict = json.loads(store.get(f"{scope}/verdict"))
            if verdict["to"].get(str(rank)) == answer["nonce"]:
                return verdict
        if asks != told:
            told = asks
            signs.heard(0)
            reply = {**answer, "to": json.loads(asks)["nonce"]}
            store.set(f"{scope}/{rank}", json.dumps(reply))
        if time.monotonic() - looked >= _LOOK_S:
            looked = time.monotonic()
            if why := signs.look(0):
                return {"dead": [why], "problems": []}
        time.sleep(next(pauses))


def _pauses(size: int) -> Iterator[float]:
    # At most some thousand requests a second for the Store, however many ranks.
    pause = 0.002
    while True:
        yield pause
        pause = min(2 * pause, max(0.1, size / 1000))


def _own_connection(store: dist.Store) -> dist.Store:
    # A request on a client that sits in another thread's wait would block.
    try:
        return store.clone()
    except (NotImplementedError, RuntimeError):
        return store
