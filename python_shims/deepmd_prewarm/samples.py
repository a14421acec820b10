# SPDX-License-Identifier: LGPL-3.0-or-later
"""Sample inputs of a task: how they are called, and what memory they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Footprint", "Samples", "as_call", "tensors_in"]

#: One per shape class; or a callable that makes them when their turn comes.
Samples = Sequence[Any] | Callable[[], Iterable[Any]]


def as_call(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read one sample as the arguments of a call, unchanged.

    Parameters
    ----------
    sample
        A tuple (arguments), a dict (keyword arguments), a pair of a tuple and
        a dict (both), or a tensor (the only argument).

    Returns
    -------
    tuple
        ``(args, kwargs)``.

    Raises
    ------
    TypeError
        If it is something else.
    """
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, dict) and all(isinstance(key, str) for key in sample):
        return (), sample
    if isinstance(sample, tuple):
        if (
            len(sample) == 2
            and isinstance(sample[0], tuple)
            and isinstance(sample[1], dict)
        ):
            return sample
        return sample, {}
    raise TypeError(
        "expected a sample to be a tuple of arguments, a dict of keyword arguments,"
        f" a pair (tuple, dict) or a tensor, got {type(sample).__name__}. A single"
        " argument x is written (x,)"
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a nest of mappings, sequences and dataclasses.

    Parameters
    ----------
    value
        What a model takes or returns.

    Yields
    ------
    torch.Tensor
        Each tensor, as often as it occurs.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


class Footprint:
    """Storages of tensors, watched without being kept alive."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch the storages of these tensors.

        Parameters
        ----------
        tensors
            Tensors; those without a storage of their own are left out.
        """
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.is_meta:
                continue
            try:
                storage = tensor.untyped_storage()
                size = storage.nbytes()
            except (NotImplementedError, RuntimeError):  # wrapper subclasses
                continue
            watched = StorageWeakRef(storage)
            self._storages.setdefault(watched.cdata, (watched, size))

    def gone(self) -> int:
        """Bytes of the watched storages that are free now.

        Returns
        -------
        int
            Bytes.
        """
        return sum(size for watched, size in self._storages.values() if _freed(watched))


def _freed(watched: StorageWeakRef) -> bool:
    if watched.expired():
        return True
    storage = torch.UntypedStorage._new_with_weak_ptr(watched.cdata)
    return storage is None or storage.nbytes() == 0
