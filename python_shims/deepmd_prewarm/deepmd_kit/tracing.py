# SPDX-License-Identifier: LGPL-3.0-or-later
"""What happens around one task's trace: lifeline, digest, inputs, seconds.

deepmd-kit traces a task's lower model with `make_fx` and hands the graph to
`torch.compile`. Three functions of the trainer's module are wrapped, which call the
original and change neither arguments nor result:

- `_trace_and_compile`, `_trace_and_compile_graph`: the time is booked as tracing,
  and every tensor that the trace is fed is watched by weak reference;
- `_finalize_compiled_lower`: the compiled lower keeps the graph it executes alive.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from .faults import guarded

if TYPE_CHECKING:
    from deepmd_prewarm.report import TaskRecord

__all__ = [
    "FINALIZE",
    "TRACERS",
    "GraphDigests",
    "install",
    "recorded_in",
    "switch",
]

#: Functions of the trainer's module that trace, and the one that compiles.
TRACERS = ("_trace_and_compile", "_trace_and_compile_graph")
FINALIZE = "_finalize_compiled_lower"

_record: TaskRecord | None = None
_is_on = False


def switch(on: bool) -> None:
    """Let the wrapped functions do their work, or be the originals.

    Parameters
    ----------
    on
        False where the plugin degraded: then training is unchanged.
    """
    global _is_on
    _is_on = on


@contextmanager
def recorded_in(record: TaskRecord) -> Iterator[None]:
    """Book traces that happen inside to a task's record.

    Parameters
    ----------
    record
        The task's record.
    """
    global _record
    before, _record = _record, record
    try:
        yield
    finally:
        _record = before


class GraphDigests:
    """Digest of the graph that a compiled lower executes, kept beside it."""

    def __init__(self) -> None:
        self._digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def note(self, compiled: Any, graph: torch.fx.GraphModule) -> None:
        """Remember the digest of a graph.

        Parameters
        ----------
        compiled
            What `torch.compile` made of it.
        graph
            The graph; its code and the shapes of its constants count, their
            values do not.
        """
        hashed = hashlib.sha256(graph.code.encode())
        for name, tensor in sorted(
            [*graph.named_parameters(), *graph.named_buffers()], key=lambda one: one[0]
        ):
            hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        self._digests[compiled] = hashed.hexdigest()[:16]

    def of(self, compiled: Any) -> str | None:
        """Look a digest up.

        Parameters
        ----------
        compiled
            A compiled lower.

        Returns
        -------
        str or None
            None if it was not seen when it was made.
        """
        return self._digests.get(compiled)


digests = GraphDigests()


def install(module: ModuleType) -> None:
    """Wrap the tracing functions of the trainer's module.

    Parameters
    ----------
    module
        `deepmd.pt_expt.train.training`.
    """
    for name in TRACERS:
        setattr(module, name, _watching(getattr(module, name)))
    setattr(module, FINALIZE, _keeping_alive(getattr(module, FINALIZE)))


def _watching(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def traced(*args: Any, **kwargs: Any) -> Any:
        record = _record
        if record is None:
            return trace(*args, **kwargs)
        with guarded("watching trace inputs"):
            record.watch(_tensors((args, kwargs)))
        with record.timed("trace"), _fed_tensors_watched(record):
            return trace(*args, **kwargs)

    return traced


@contextmanager
def _fed_tensors_watched(record: TaskRecord) -> Iterator[None]:
    """Watch what `make_fx` is fed: the padded copies, which exist in it only."""
    from torch.fx.experimental import proxy_tensor

    make_fx = proxy_tensor.make_fx

    @functools.wraps(make_fx)
    def watched_make_fx(*options: Any, **named: Any) -> Callable[..., Any]:
        trace = make_fx(*options, **named)

        @functools.wraps(trace)
        def fed(*inputs: Any) -> Any:
            with guarded("watching trace inputs"):
                record.watch(_tensors(inputs))
            return trace(*inputs)

        return fed

    proxy_tensor.make_fx = watched_make_fx
    try:
        yield
    finally:
        proxy_tensor.make_fx = make_fx


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.nn.Module):
        return
    for leaf in torch.utils._pytree.tree_leaves(nest):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _keeping_alive(finalize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(finalize)
    def finalized(traced_lower: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = finalize(traced_lower, *args, **kwargs)
        if not _is_on:
            return compiled
        # deepmd-kit compiles a rebuilt copy of the graph. The copy's nodes own
        # the values that view metadata points to; the first one may go.
        graph = getattr(compiled, "_orig_mod", traced_lower)
        with guarded("lifeline of a compiled lower"):
            from deepmd_prewarm.tasks import keep_alive

            keep_alive(compiled, graph)
        with guarded("digest of a graph"):
            digests.note(compiled, graph)
        return compiled

    return finalized
