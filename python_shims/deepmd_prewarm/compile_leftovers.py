# SPDX-License-Identifier: LGPL-3.0-or-later
"""What compiling a task leaves behind and nobody needs once it has run.

Every private name of torch that this needs is used in this file. One that a torch
release lacks is told once, by name (`missing`), and the rest goes on: the cost is
memory, never a wrong number.

Freed after a task: the metadata of the nodes of graphs that the task's turn made
(fake tensors, stack traces, provenance), the memo tables of its shape environments,
Dynamo's memo of cleaned instructions, and free heap pages. Kept: graphs, their code,
guards, every symbolic integer of a graph (view metadata in C++ points to some of
them), and the metadata of a backward that is still to be compiled and of an
`ExportedProgram`.

Environment variables: ``DP_PREWARM_LEFTOVERS=0`` keeps everything;
``DP_PREWARM_TRIM=0`` leaves free heap pages with the process.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .live_objects import instances_of

__all__ = ["Leftovers", "missing", "trim_heap"]

_log = logging.getLogger(__name__)


def _fake_tensor_memo() -> Callable[[], None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode.cache_clear  # type: ignore[no-any-return]


def _instruction_memo() -> Callable[[], None]:
    from torch._dynamo import bytecode_transformation

    return bytecode_transformation._cached_cleaned_instructions.cache_clear  # type: ignore[no-any-return]


def _shape_env() -> type:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if not hasattr(ShapeEnv(), "fake_tensor_cache"):
        raise AttributeError("ShapeEnv.fake_tensor_cache")
    return ShapeEnv  # type: ignore[no-any-return]


def _lazy_backward() -> type:
    from torch._functorch._aot_autograd.runtime_wrappers import (
        AutogradLazyBackwardCompileInfo,
    )

    return AutogradLazyBackwardCompileInfo  # type: ignore[no-any-return]


_INSTRUCTIONS = "bytecode_transformation._cached_cleaned_instructions"

_NAMES: dict[str, Callable[[], Any]] = {
    "FakeTensorMode.cache_clear": _fake_tensor_memo,
    _INSTRUCTIONS: _instruction_memo,
    "ShapeEnv.fake_tensor_cache": _shape_env,
    "AutogradLazyBackwardCompileInfo": _lazy_backward,
}


def missing() -> list[str]:
    """List the private names of torch that this release does not have.

    Returns
    -------
    list of str
        Names; empty on torch 2.11.
    """
    return [name for name in _NAMES if _find(name) is None]


@functools.cache
def _find(name: str) -> Any:
    try:
        return _NAMES[name]()
    except (ImportError, AttributeError):
        _log.warning(
            "deepmd-prewarm: torch %s has no %s: what it remembers of each task"
            " stays in memory. Training is not affected",
            torch.__version__,
            name,
        )
        return None


def trim_heap() -> bool:
    """Give free pages of the C heap back to the system.

    Returns
    -------
    bool
        False where the C library has no `malloc_trim`, and with
        ``DP_PREWARM_TRIM=0``.
    """
    if os.environ.get("DP_PREWARM_TRIM", "1") == "0":
        return False
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return False
    trim(0)
    return True


#: The symbolic integers that a graph's metadata had: they live as long as the graph.
_symbols_of: weakref.WeakKeyDictionary[torch.fx.Graph, list[Any]] = (
    weakref.WeakKeyDictionary()
)


class Leftovers:
    """Graphs that were there before, so that only later ones are touched.

    Graphs of the caller's own, made before this, keep their metadata.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[torch.fx.Graph] = weakref.WeakSet()
        self._known_envs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._on = os.environ.get("DP_PREWARM_LEFTOVERS", "1") != "0"
        if self._on:
            for one in instances_of(torch.fx.Graph, *_shape_envs()):
                known = isinstance(one, torch.fx.Graph)
                (self._known if known else self._known_envs).add(one)

    def release(self) -> int:
        """Free what was left since the last call; collects no garbage itself.

        Returns
        -------
        int
            Metadata entries that were dropped.
        """
        if not self._on:
            return 0
        exported = torch.export.ExportedProgram
        found = instances_of(torch.fx.Node, exported, *_shape_envs())
        pending = self._settle_backwards()
        dropped = 0
        if pending is not None:
            kept = {id(one.graph) for one in found if isinstance(one, exported)}
            kept |= pending
            # By node: one that was erased is in no graph's list, but may be alive.
            nodes = [
                one
                for one in found
                if isinstance(one, torch.fx.Node)
                and id(one.graph) not in kept
                and one.graph not in self._known
            ]
            dropped = sum(map(_drop_metadata, nodes))
            self._known.update(node.graph for node in nodes)
            del nodes
        for one in found:
            if isinstance(one, _shape_envs()):
                self._forget(one, keep_inputs=pending is None or bool(pending))
        del found
        for name in ("FakeTensorMode.cache_clear", _INSTRUCTIONS):
            clear = _find(name)
            if clear is not None:
                clear()
        return dropped

    def _forget(self, shape_env: Any, *, keep_inputs: bool) -> None:
        """Drop a shape environment's memo and the inputs its guards were made of."""
        shape_env.fake_tensor_cache.clear()
        inputs = getattr(shape_env, "tracked_fakes", None)
        if inputs and not keep_inputs and shape_env not in self._known_envs:
            inputs.clear()

    def _settle_backwards(self) -> set[int] | None:
        """Find backward graphs still to be compiled; None if that cannot be told.

        A lazily compiled backward reads its graph's metadata on the first call.
        """
        kind = _find("AutogradLazyBackwardCompileInfo")
        if kind is None:
            return None
        pending: set[int] = set()
        for function in torch.autograd.Function.__subclasses__():
            info = getattr(function, "_lazy_backward_info", None)
            if not isinstance(info, kind):
                continue
            if getattr(function, "compiled_bw", None) is None:
                pending.add(id(info.bw_module.graph))
            elif isinstance(info.placeholder_list, list):
                info.placeholder_list.clear()
        return pending


def _shape_envs() -> tuple[type, ...]:
    """Give the class of shape environments, or nothing where torch has another."""
    shape_env = _find("ShapeEnv.fake_tensor_cache")
    return () if shape_env is None else (shape_env,)


def _drop_metadata(node: torch.fx.Node) -> int:
    symbols: list[Any] = []
    for value in node.meta.values():
        symbols.extend(_symbols(value))
    dropped = len(node.meta)
    # Not cleared: nodes of several graphs share one dictionary.
    node.meta = {}
    if symbols:
        _symbols_of.setdefault(node.graph, []).extend(symbols)
    return dropped


def _symbols(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the symbolic integers of a value: its own and those of its tensors."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        yield value
    elif isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            sizes = (*value.shape, *value.stride(), value.storage_offset())
            yield from (one for one in sizes if isinstance(one, torch.SymInt))
    elif depth and isinstance(value, list | tuple):
        for one in value:
            yield from _symbols(one, depth - 1)
    elif depth and isinstance(value, dict):
        for one in value.values():
            yield from _symbols(one, depth - 1)
