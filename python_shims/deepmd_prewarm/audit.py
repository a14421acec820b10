# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a piece of a program made and left alive, and who holds it.

    with deepmd_prewarm.audit() as audit:
        compile_one_task()
    print(audit.table())

For any PyTorch program: nothing here knows deepmd-kit or this plugin's operators.
"""

from __future__ import annotations

import functools
import gc
import os
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, Field

from .held_objects import Held, Kind
from .live_objects import instances_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Audit", "Held", "audit"]

# How far from an object its holder is looked for: list in dict in object.
_DEPTH = 4


class Audit(BaseModel):
    """What was made inside `audit()` and was alive at its end.

    Attributes
    ----------
    held
        Groups by kind, holder and device, the largest first.
    collected
        Whether garbage was collected at the end; not while gc is disabled.
    in_cycles
        Objects by kind that only reference cycles kept: gone now if
        `collected`.
    """

    held: list[Held] = Field(default_factory=list)
    collected: bool = False
    in_cycles: dict[str, int] = Field(default_factory=dict)

    def count(self, kind: Kind | None = None) -> int:
        """Count objects that are still alive.

        Parameters
        ----------
        kind
            One kind; None: all.

        Returns
        -------
        int
            Number of objects.
        """
        return sum(one.count for one in self.held if kind in (None, one.kind))

    def nbytes(self, device: str | None = None) -> int:
        """Add up the storages that are still alive.

        Parameters
        ----------
        device
            For example ``"cpu"`` or ``"cuda:0"``; None: all.

        Returns
        -------
        int
            Bytes; fake tensors have none.
        """
        return sum(one.nbytes for one in self.held if device in (None, one.device))

    def table(self) -> Table:
        """Make a table for the terminal.

        Returns
        -------
        rich.table.Table
            One line a group.
        """
        from rich.table import Table

        cycles = ", ".join(f"{n} {kind}" for kind, n in self.in_cycles.items())
        table = Table(
            "kind",
            "held by",
            "device",
            "count",
            "bytes",
            title="made inside and still alive",
            caption=f"only in reference cycles: {cycles}" if cycles else None,
        )
        for one in self.held:
            table.add_row(
                one.kind, one.holder, one.device, str(one.count), f"{one.nbytes:,}"
            )
        return table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON.

        Parameters
        ----------
        path
            File; its folder must exist.
        """
        Path(path).write_text(self.model_dump_json(indent=1) + "\n")


@contextmanager
def audit() -> Iterator[Audit]:
    """Find what is made inside and still alive at the end.

    Costs a pass over all Python objects at entry and about four at exit
    (seconds in a large process); nothing in between. Holders are looked for in
    Python objects: what only C++ holds (an autograd graph, a compiled artefact)
    is told as ``"C++ or an autograd graph"``.

    Yields
    ------
    Audit
        Empty until the block ends, also by an exception.
    """
    result = Audit()
    there = instances_of(*_kinds())
    before = {id(one): weakref.ref(one) for one in there}
    storages = {_storage_key(one) for one in there if _is_real(one)}
    del there
    try:
        yield result
    finally:
        _fill(result, before, storages)


def _fill(
    result: Audit, before: dict[int, weakref.ref[Any]], storages: set[int]
) -> None:
    def made() -> list[Any]:
        # An old id with another object behind it is a new object.
        return [
            one
            for one in instances_of(*_kinds())
            if (old := before.get(id(one))) is None or old() is not one
        ]

    refs = [(_kind_of(one), weakref.ref(one)) for one in made()]
    if gc.isenabled():  # a program that switched it off has its reasons
        gc.collect()
        result.collected = True
    died = Counter(str(kind) for kind, ref in refs if ref() is None)
    result.in_cycles = dict(died)
    alive = made()
    groups: dict[tuple[Kind, str, str], Held] = {}
    seen = set(storages)
    for one, holder in zip(alive, _holders(alive), strict=True):
        kind = _kind_of(one)
        device = str(one.device) if isinstance(one, torch.Tensor) else ""
        group = groups.setdefault(
            (kind, holder, device), Held(kind=kind, holder=holder, device=device)
        )
        group.count += 1
        if kind == "tensor" and (key := _storage_key(one)) not in seen:
            seen.add(key)
            group.nbytes += _nbytes(one)
    result.held = sorted(
        groups.values(), key=lambda one: (one.nbytes, one.count), reverse=True
    )


@functools.cache
def _kinds() -> dict[type, Kind]:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return {
        FakeTensor: "fake tensor",
        torch.Tensor: "tensor",
        torch.fx.Graph: "graph",
        ShapeEnv: "shape environment",
    }


def _kind_of(one: Any) -> Kind:
    return next(kind for base, kind in _kinds().items() if issubclass(type(one), base))


def _is_real(one: Any) -> bool:
    return _kind_of(one) == "tensor" and one.layout is torch.strided


def _storage_key(one: torch.Tensor) -> int:
    try:
        return int(one.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, functorch wrapper
        return -id(one)


def _nbytes(one: torch.Tensor) -> int:
    if one.device.type == "meta":
        return 0
    try:
        storage = one.untyped_storage()
        return storage.nbytes() if storage.data_ptr() else 0
    except (NotImplementedError, RuntimeError):
        return 0


def _holders(alive: list[Any]) -> list[str]:
    """Say for each object who holds it, in a pass over all objects for each level."""
    parents = _parents_of(alive, ours={id(alive)})
    wanted: list[Any] = [one for found in parents.values() for one in found]
    known = dict(parents)
    for _ in range(_DEPTH):
        wanted = [one for one in wanted if _is_plain(one) and id(one) not in known]
        if not wanted:
            break
        own = {id(alive), id(wanted), id(known), id(parents)}
        further = _parents_of(wanted, own | {id(found) for found in known.values()})
        known.update(further)
        wanted = [one for found in further.values() for one in found]
    return [_holder_of(one, known, _DEPTH) for one in alive]


def _parents_of(targets: Iterable[Any], ours: set[int]) -> dict[int, list[Any]]:
    ids = {id(one) for one in targets}
    found: dict[int, list[Any]] = defaultdict(list)
    for one in gc.get_objects():
        if id(one) in ours or type(one) is types.FrameType:
            continue
        for part in gc.get_referents(one):
            if id(part) in ids:
                found[id(part)].append(one)
    for number in ids:
        found.setdefault(number, [])
    return dict(found)


def _is_plain(one: Any) -> bool:
    """Whether something is a container that says nothing about its owner."""
    return type(one) in (dict, list, tuple, set, types.CellType) or (
        type(one).__name__ in ("OrderedDict", "defaultdict", "immutable_list")
    )


def _holder_of(one: Any, known: dict[int, list[Any]], depth: int) -> str:
    names = [_name(one, parent, known, depth) for parent in known.get(id(one), ())]
    told = [name for name in names if name is not None]
    # The most telling first: a list is a holder too, but who has the list?
    return min(told, key=_vagueness) if told else "C++ or an autograd graph"


def _vagueness(name: str) -> tuple[int, str]:
    order = ("module ", "graph metadata", "global ", "attribute ", "closure")
    for rank, word in enumerate(order):
        if name.startswith(word):
            return rank, name
    return len(order), name


def _name(one: Any, parent: Any, known: dict[int, list[Any]], depth: int) -> str | None:
    if isinstance(parent, dict):
        key = next((str(k) for k, value in parent.items() if value is one), "a key")
        for owner in known.get(id(parent), ()):
            if isinstance(owner, types.ModuleType):
                return f"global {owner.__name__}.{key}"
            if isinstance(owner, torch.fx.Node):
                return f"graph metadata: {key}"
            if isinstance(owner, torch.nn.Module):
                return f"module {type(owner).__name__}.{key}"
            if isinstance(owner, types.FunctionType):
                return f"global {owner.__module__}.{key}"
            if _vars_of(owner) is parent:
                return f"attribute {type(owner).__name__}.{key}"
    if _is_plain(parent):
        if not depth:
            return None
        outer = _holder_of(parent, known, depth - 1)
        if outer.endswith(("._buffers", "._parameters")) and key:
            return f"{outer.rpartition('.')[0]}.{key}"
        if outer != "C++ or an autograd graph":
            return outer
        return "closure" if type(parent) is types.CellType else type(parent).__name__
    if isinstance(parent, types.FunctionType):
        return f"closure of {parent.__qualname__}"
    # An object keeps its values without a dict until somebody asks for one.
    values = _vars_of(parent) or {}
    key = next((f".{k}" for k, value in values.items() if value is one), "")
    word = "module" if isinstance(parent, torch.nn.Module) else "attribute"
    return f"{word} {type(parent).__name__}{key}"


def _vars_of(owner: Any) -> Any:
    """Get an object's own dictionary, without running code of its class."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
