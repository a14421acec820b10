# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a rank process of the fault tests runs; `rank_job` starts it.

A rank says over its pipe what it does and when (the clock is the same for all
processes of a host), and does what the pipe tells it: go to the meeting, or
fail in a given way.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from deepmd_prewarm import _library, agreement
from rank_entry import CONNECT_S, GROUP_TIMEOUT_S

_library.bridge()


class Link:
    """A rank's end of the pipe to the test."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def say(self, *words: Any) -> None:
        self.pipe.send((time.monotonic(), *words))

    def order(self) -> Any:
        return self.pipe.recv()


def host_store(pipe: Connection) -> None:
    """Host a TCPStore until killed, as the agent of torchrun does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


def rank_main(
    pipe: Connection, rank: int, world: int, port: int, options: dict[str, Any]
) -> None:
    """Make the group, meet once, then run the round in which the fault is."""
    os.environ.update(options.get("environment", {}))
    if options.get("local_ranks"):
        os.environ["LOCAL_RANK"] = options["local_ranks"][rank]
    link = Link(pipe)
    host = options.get("host", "127.0.0.1")
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    if options.get("gloo", True):
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=CONNECT_S),
        )
        # For collectives: making the group is gloo's own affair, and slow on a
        # machine that is busy.
        dist.distributed_c10d._set_pg_timeout(
            datetime.timedelta(seconds=GROUP_TIMEOUT_S), dist.group.WORLD
        )
        group = None
    else:
        group = agreement.group_over_store(store, rank, world, "ranks")
    agreement.watch(group)
    agreement.agree("first", group=group)
    if options.get("after_verdict"):
        link.say("first passed")
    link.say("ready", os.getpid())
    try:
        if options.get("prewarm"):
            _warm(link, rank)
        else:
            _phase(link, group, options)
    except BaseException as error:
        link.say("raised", type(error).__name__, str(error))
    else:
        link.say("passed")
    while (order := link.order()) != "end":
        try:
            if order == "meet again":
                agreement.agree("second", group=group)
        except RuntimeError as error:
            link.say("raised", type(error).__name__, str(error))
        else:
            link.say("passed")


def _phase(link: Link, group: Any, options: dict[str, Any]) -> None:
    tasks = ["a", "b", "c"]
    with agreement.together("compile b", group) as phase:
        link.say("compiling")
        order = link.order()
        if order == "different tasks":
            tasks.remove("b")
        elif order != "meet":
            commit(order)
        phase.fingerprint = agreement.task_fingerprint(tasks)
        link.say("meeting")


def _warm(link: Link, rank: int) -> None:
    from deepmd_prewarm.prewarm import PrewarmTask, prewarm

    def compute(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()

    def compute_b(x: torch.Tensor) -> torch.Tensor:
        if order != "sample provider":
            commit(order)
        return compute(x)

    def samples_b() -> list[tuple[torch.Tensor]]:
        nonlocal order
        link.say("compiling")
        order = link.order()
        link.say("meeting")
        if order == "sample provider":
            raise StopIteration("no frame in set.000")
        return [(torch.ones(3),)]

    order = "meet"
    prewarm(
        [
            PrewarmTask("a", compute, [(torch.ones(3),)], mode="eval"),
            PrewarmTask("b", compute_b, samples_b, mode="eval"),
        ],
        progress=False,
    )


def commit(fault: str) -> None:
    """Do what the test ordered, from inside this process."""
    kind, _, value = fault.partition(" ")
    if kind == "raise":
        raise ValueError(value)
    if kind == "memory":
        raise MemoryError("cannot allocate 1.5 TiB")
    if kind == "exit":
        os._exit(int(value))
    if kind == "sleep":
        time.sleep(float(value))
    elif kind == "gil":
        # PyDLL keeps the GIL during the call.
        ctypes.PyDLL(None).usleep(int(float(value) * 1e6))
    elif kind == "segfault":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
