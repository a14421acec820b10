# SPDX-License-Identifier: LGPL-3.0-or-later
"""One batch for every shape class that training will meet.

A compiled graph is guarded by what its sizes have in common: one frame or many,
one atom or many, sizes that are equal by chance. So a task has to be warmed with
every layout its data can deliver, not with one batch. Drawing moves the data
systems and the random streams; `unmoved` puts them back, so that training draws
exactly the batches it would have drawn.

Everything here reads private names of deepmd-kit 3.2.0's `DeepmdDataSystem` and
`LmdbDataSystem`; data of another kind raises `TypeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["ShapeClass", "shape_classes", "unmoved"]

#: A raw batch, as a data system's `get_batch` returns it.
Batch = dict[str, Any]

# Larger than any set: asks a system to load its next set.
_PAST_THE_END = 1 << 62


@dataclass(frozen=True)
class ShapeClass:
    """Batches that meet the same compiled graph.

    Attributes
    ----------
    nframes
        Frames of the batch.
    natoms
        Atoms of a frame, or of the whole batch where frames are concatenated.
    kind
        What else tells batches apart: periodic or not, padded, concatenated.
    draw
        Draws one batch; moves the data system.
    """

    nframes: int
    natoms: int
    kind: str
    draw: Callable[[], Batch]

    @property
    def key(self) -> tuple[int, int, str]:
        """What two batches of one class have in common."""
        return (self.nframes, self.natoms, self.kind)


def shape_classes(
    data: Any,
    *,
    also_frames: tuple[int, ...] = (),
    constants: tuple[int, ...] = (2, 3),
) -> list[ShapeClass]:
    """List the layouts that a data system can deliver.

    Parameters
    ----------
    data
        A `DeepmdDataSystem` or an `LmdbDataSystem`.
    also_frames
        Numbers of frames to cover besides those of a batch, as far as a system
        has them (full validation cuts its own batches).
    constants
        Fixed sizes among the inputs of a compiled graph. A number of frames or
        atoms that equals one is taken for the same size, and the graph is
        guarded by it: such batches are a class of their own.

    Returns
    -------
    list of ShapeClass
        Each layout once, in the order of the systems. Nothing is read yet.

    Raises
    ------
    TypeError
        If the data is of another kind.
    """
    if hasattr(data, "data_systems") and hasattr(data, "batch_size"):
        found = _of_systems(data, also_frames)
    elif hasattr(data, "_reader") and hasattr(data._reader, "decode_batch"):
        found = _of_lmdb(data, also_frames, frozenset(constants))
    else:
        raise TypeError(
            "shape_classes: expected a DeepmdDataSystem or an LmdbDataSystem, got "
            f"{type(data).__module__}.{type(data).__name__}"
        )
    return _first_of_each(found, lambda one: one.key)


def _first_of_each(
    found: list[ShapeClass], key: Callable[[ShapeClass], Any]
) -> list[ShapeClass]:
    kept: dict[Any, ShapeClass] = {}
    for one in found:
        kept.setdefault(key(one), one)
    return list(kept.values())


def _of_systems(data: Any, also_frames: tuple[int, ...]) -> list[ShapeClass]:
    if data.mixed_systems:
        return _of_mixed_systems(data)
    found = []
    for index, system in enumerate(data.data_systems):
        kind = "periodic" if system.pbc else "open"
        batch = int(data.batch_size[index])
        for number, folder in enumerate(system.dirs):
            held = int(system._get_nframes(folder))
            sizes = dict.fromkeys(min(wanted, held) for wanted in (batch, *also_frames))
            for size in sizes:
                found.append(
                    ShapeClass(
                        size,
                        int(data.natoms[index]),
                        kind,
                        _set_drawer(data, index, number, size),
                    )
                )
    return found


def _set_drawer(data: Any, index: int, number: int, size: int) -> Callable[[], Batch]:
    def draw() -> Batch:
        system = data.data_systems[index]
        if system.get_numb_set() > 1:
            system.set_count, system.iterator = number, _PAST_THE_END
        usual = data.batch_size[index]
        data.batch_size[index] = size
        try:
            batch: Batch = data.get_batch(index)
        finally:
            data.batch_size[index] = usual
        return batch

    return draw


def _of_mixed_systems(data: Any) -> list[ShapeClass]:
    # "mixed:N" fills a batch with frames of any system and pads them to the
    # largest: N frames, and the atoms of any system.
    found = []
    for index, natoms in enumerate(data.natoms):

        def draw(index: int = index) -> Batch:
            usual = data.sys_probs
            data.sys_probs = np.eye(data.nsystems)[index]
            try:
                batch: Batch = data.get_batch()
            finally:
                data.sys_probs = usual
            return batch

        found.append(ShapeClass(int(data.batch_size[0]), int(natoms), "mixed", draw))
    return found


def _of_lmdb(
    data: Any, also_frames: tuple[int, ...], constants: frozenset[int]
) -> list[ShapeClass]:
    reader = data._reader

    def drawer(indices: list[int], ragged: bool | None = None) -> Callable[[], Batch]:
        # Frames are read by number: neither the sampler nor the prefetched
        # batches move.
        return lambda: dict(reader.decode_batch(indices, ragged=ragged))

    if reader.mixed_nloc:
        found = []
        made = _small_batches(reader, {1, *constants})
        for indices in [*_pending_batches(data._sampler), *made]:
            nlocs = reader.frame_nlocs[np.asarray(indices)]
            if reader.ragged_batches:
                natoms, kind = int(nlocs.sum()), "concatenated"
            else:
                natoms = int(nlocs.max())
                kind = "padded" if int(nlocs.min()) < natoms else "full"
            found.append(ShapeClass(len(indices), natoms, kind, drawer(indices)))

        # Frames differ in every batch: one batch for each pattern of sizes.
        def pattern(one: ShapeClass) -> tuple[Any, ...]:
            frames, atoms = (
                size if size == 1 or size in constants else 0
                for size in (one.nframes, one.natoms)
            )
            return frames, atoms, one.nframes == one.natoms, one.kind

        return _first_of_each(found, pattern)
    from deepmd.dpmodel.utils.lmdb_data import collect_lmdb_sampling_groups

    found = []
    for nloc, group in collect_lmdb_sampling_groups(reader):
        batch = int(reader.get_batch_size_for_nloc(nloc))
        wanted = [batch, len(group) % batch, *also_frames]
        if data._sampler is not None and _has_blocks(data._sampler):
            # Systems weighted by auto_prob leave any remainder.
            wanted += [one for one in sorted({1, *constants}) if one < batch]
        for size in dict.fromkeys(min(one, len(group)) for one in wanted if one > 0):
            indices = [int(one) for one in group[:size]]
            found.append(ShapeClass(size, int(nloc), "lmdb", drawer(indices)))
    return found


def _pending_batches(sampler: Any) -> list[list[int]]:
    """List the batches of the pass that training starts with; draws nothing."""
    whole = getattr(sampler, "_global_batches", None) or sampler.batches
    return list(whole())


def _small_batches(reader: Any, frames: set[int]) -> list[list[int]]:
    """Make the batches of few frames that a later pass may bring."""
    smallest = np.argsort(reader.frame_nlocs, kind="stable")
    nlocs = reader.frame_nlocs[smallest]
    return [
        [int(one) for one in smallest[:number]]
        for number in sorted(frames)
        if number <= len(smallest)
        and (number == 1 or int(nlocs[:number].sum()) <= reader.atom_budget)
    ]


def _has_blocks(sampler: Any) -> bool:
    return bool(getattr(sampler, "_block_targets", None))


@contextmanager
def unmoved(*data_systems: Any) -> Iterator[None]:
    """Put data systems and deepmd-kit's random stream back, also on error.

    Parameters
    ----------
    data_systems
        Data systems that are drawn from inside; None is skipped.
    """
    from deepmd.utils import random as dp_random

    stream = dp_random._RANDOM_GENERATOR
    state = stream.get_state()
    places = [_place_of(data) for data in data_systems if data is not None]
    try:
        yield
    finally:
        for put_back in places:
            put_back()
        stream.set_state(state)


def _place_of(data: Any) -> Callable[[], None]:
    owners = [data, *getattr(data, "data_systems", [])]
    # What get_batch moves. A set that warming loaded is given back with its
    # attribute: it was not there before.
    names = ("pick_idx", "iterator", "set_count", "batch_set")
    before = [
        (owner, {name: vars(owner)[name] for name in names if name in vars(owner)})
        for owner in owners
    ]

    def put_back() -> None:
        for owner, values in before:
            for name in names:
                if name in values:
                    setattr(owner, name, values[name])
                elif name in vars(owner):
                    delattr(owner, name)

    return put_back
