# SPDX-License-Identifier: LGPL-3.0-or-later
"""DistributedDataParallel without its collectives, for the time of a warm-up.

A warm-up must run inside DDP (torch splits the graph there), but one rank
compiles for minutes while another is done: whoever entered a collective would
wait in it until the process group's time-out. What DDP sends in a forward and
in the backward of a static graph's first iteration hangs on three attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["collective_free", "first_collective_module"]

# What it stops, in torch 2.11 and 2.15: the broadcast of buffers; counting the
# iteration (a static graph learns from iteration 1); the delayed all-reduce.
_QUIET = {
    "require_forward_param_sync": False,
    "require_backward_grad_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}


@contextmanager
def collective_free(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run DDP modules without a collective; everything is as before afterwards.

    Parameters
    ----------
    modules
        Modules to look through, at any depth.

    Raises
    ------
    RuntimeError
        If this torch's DDP no longer has one of the attributes.
    """
    found = {
        id(module): module
        for root in modules
        for module in root.modules()
        if isinstance(module, DistributedDataParallel)
    }
    before: list[tuple[Any, str, Any]] = []
    for ddp in found.values():
        for name in _QUIET:
            # Only a static graph has the last one.
            if name in vars(ddp):
                before.append((ddp, name, vars(ddp)[name]))
            elif not name.startswith("_static"):
                raise RuntimeError(
                    "deepmd-prewarm: DistributedDataParallel of torch"
                    f" {torch.__version__} has no attribute {name!r}; warming it up"
                    " would enter a collective. Please report this"
                )
    try:
        for ddp, name, _ in before:
            setattr(ddp, name, _QUIET[name])
        yield
    finally:
        for ddp, name, value in before:
            setattr(ddp, name, value)


def first_collective_module(modules: Iterable[torch.nn.Module]) -> str | None:
    """Name a module whose forward is a collective by itself.

    Parameters
    ----------
    modules
        Modules to look through, at any depth.

    Returns
    -------
    str or None
        Its class, for instance ``"SyncBatchNorm"``; None if there is none.
    """
    for root in modules:
        for module in root.modules():
            kind = type(module).__name__
            if kind == "SyncBatchNorm" and module.training:
                return kind
            # fully_shard makes a class FSDP<Class> of each module's class.
            if kind == "FullyShardedDataParallel" or kind.startswith("FSDP"):
                return kind
    return None
