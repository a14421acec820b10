# SPDX-License-Identifier: LGPL-3.0-or-later
"""Look for who holds a tensor in Python, beyond the caller's frame and list.

The operators see C++ references only: a tensor that a module, a hook or another
frame holds under its own name looks to them like one that only the caller has.
Python's reference count of the tensor knows: the list's entries and the caller's
variables are counted, and whatever is left belongs to somebody else. That needs
no walk over the heap, except for a variable that an inner function uses too (is
it still shared?) and to put a holder into words.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from inspect import CO_OPTIMIZED
from types import CellType, FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PARAMETER = "a Parameter: modules and optimizers own it"


def _references(items: Sequence[object], index: int) -> int:
    """Count the references to an element, its place in ``items`` included."""
    return sys.getrefcount(items[index]) - _OVERHEAD


_OVERHEAD = 0
_OVERHEAD = _references([object()], 0) - 1


class Holders:
    """Looks for holders of the tensors of one list.

    Parameters
    ----------
    items : list of Tensor or None
        A list of the caller's own making, so that each entry is one reference.
    given : object
        What the user passed; entries of a list or tuple are given up with it.
    frame : FrameType
        The frame whose variables are given up too.
    """

    def __init__(
        self, items: list[torch.Tensor | None], given: object, frame: FrameType
    ) -> None:
        self._items = items
        self._given = given
        is_listed_twice = given is not items and isinstance(given, (list, tuple))
        places = 2 if is_listed_twice else 1
        self._explained: dict[int, int] = {}
        for key in map(id, items):
            self._explained[key] = self._explained.get(key, 0) + places
        self._in_cells: dict[int, int] = {}
        self._count_variables(frame)

    def _count_variables(self, frame: FrameType) -> None:
        explained = self._explained
        variables = frame.f_locals
        code = frame.f_code
        for name, value in variables.items():
            key = id(value)
            if key not in explained or name in code.co_freevars:
                continue  # a free variable belongs to an enclosing function
            if name in code.co_cellvars:
                self._in_cells[key] = self._in_cells.get(key, 0) + 1
            else:
                explained[key] += 1
        value = None
        # Before Python 3.13 f_locals of a function is a copy that the frame
        # keeps: it would hold the tensors until the function returns.
        if (
            isinstance(variables, dict)
            and code.co_flags & CO_OPTIMIZED
            and _references([variables], 0) == _KEPT_BY_FRAME
        ):
            variables.clear()

    def find(self) -> list[int]:
        """List the entries, by index, that somebody else holds."""
        others = {i: self._other_references(i) for i in range(len(self._items))}
        held = [i for i, number in others.items() if number > 0]
        in_cells = [i for i in held if id(self._items[i]) in self._in_cells]
        if in_cells:
            unshared = _unshared_cells([self._items[i] for i in in_cells])
            for i in in_cells:
                key = id(self._items[i])
                others[i] -= min(self._in_cells[key], unshared.get(key, 0))
        return [i for i in held if others[i] > 0]

    def _other_references(self, index: int) -> int:
        tensor = self._items[index]
        if tensor is None:
            return 0
        if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
            return sys.maxsize  # whatever the counts say
        key = id(tensor)
        # As long as C++ holds the tensor, it holds its Python object once.
        explained = self._explained[key] + int(tensor._use_count() > 1)
        del tensor
        return _references(self._items, index) - explained

    def describe(self, held: Iterable[int]) -> dict[int, str]:
        """Put into words who holds the entries with the indices ``held``."""
        words: dict[int, str] = {}
        wanted = {id(self._items[index]): index for index in held}
        ours = {id(self._items), id(self._given)}
        for referrer in gc.get_referrers(*(self._items[i] for i in wanted.values())):
            if id(referrer) in ours or isinstance(referrer, FrameType):
                continue
            for referent in gc.get_referents(referrer):
                if id(referent) in wanted:
                    words.setdefault(id(referent), _name(referrer))
        return {
            index: _PARAMETER
            if isinstance(self._items[index], torch.nn.Parameter)
            else f"held in Python by {words.get(tensor, 'another frame or object')}"
            for tensor, index in wanted.items()
        }


def _unshared_cells(tensors: list[torch.Tensor | None]) -> dict[int, int]:
    """Count, by the id of its tensor, closure cells that only one frame holds."""
    cells = [
        holder
        for holder in gc.get_referrers(*tensors)  # one pass for all of them
        if isinstance(holder, CellType)
    ]
    found: dict[int, int] = {}
    for index in range(len(cells)):
        if _references(cells, index) == 2:
            with contextlib.suppress(ValueError):  # emptied by another thread
                key = id(cells[index].cell_contents)
                found[key] = found.get(key, 0) + 1
    return found


def _name(holder: Any) -> str:
    if isinstance(holder, CellType):
        return "a closure (hook, lambda or inner function)"
    kind = type(holder)
    if kind.__module__ == "builtins":
        return f"a {kind.__name__}"
    return f"an object of {kind.__module__}.{kind.__qualname__}"


def _count_of_snapshot() -> int:
    variables = sys._getframe().f_locals
    return _references([variables], 0)


# How often a frame's snapshot of its variables is referenced when nobody but the
# frame, one variable and a list hold it.
_KEPT_BY_FRAME = _count_of_snapshot()
