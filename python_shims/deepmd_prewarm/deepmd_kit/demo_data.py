# SPDX-License-Identifier: LGPL-3.0-or-later
"""Small training data with real energies and forces, and inputs that train on them.

The effective medium theory of ase (`ase.calculators.emt`) gives energies (eV) and
forces (eV/Angstrom) of metals in milliseconds, so the demo and the trainer tests
learn something real without shipping a data set. Nothing here is imported by a
training run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "METALS",
    "Frames",
    "demo_input",
    "emt_frames",
    "write_lmdb",
    "write_npy",
]

#: Elements of the demo, and the type map of every model in it.
METALS: tuple[str, ...] = ("Cu", "Ag", "Al")


@dataclass(frozen=True)
class Frames:
    """Frames of one system: the same atoms at different places.

    Attributes
    ----------
    symbols
        Element of each atom.
    coord
        Positions in Angstrom, shape ``(nframes, natoms, 3)``.
    box
        Cell vectors in Angstrom, shape ``(nframes, 3, 3)``; None without
        periodic boundaries.
    energy
        Potential energy in eV, shape ``(nframes,)``.
    force
        Forces in eV/Angstrom, shape ``(nframes, natoms, 3)``.
    """

    symbols: tuple[str, ...]
    coord: npt.NDArray[np.float64]
    box: npt.NDArray[np.float64] | None
    energy: npt.NDArray[np.float64]
    force: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.energy)


def emt_frames(
    metal: str,
    nframes: int,
    *,
    repeat: Sequence[int] = (2, 2, 2),
    alloy: str | None = None,
    rattle: float = 0.08,
    periodic: bool = True,
    seed: int = 0,
) -> Frames:
    """Make displaced frames of one face-centred cubic crystal or cluster.

    Parameters
    ----------
    metal
        Element that ase's EMT knows (Al, Ni, Cu, Pd, Ag, Pt, Au).
    nframes
        Number of frames.
    repeat
        Cubic cells of 4 atoms along each axis: ``4 * prod(repeat)`` atoms.
    alloy
        A second element that takes every fourth site.
    rattle
        Standard deviation of the displacements in Angstrom.
    periodic
        False makes a cluster in vacuum.
    seed
        Seed of the displacements.

    Returns
    -------
    Frames
        Positions, cells, energies and forces.
    """
    from ase.build import bulk
    from ase.calculators.emt import EMT

    rng = np.random.default_rng(seed)
    atoms = bulk(metal, "fcc", cubic=True).repeat(tuple(repeat))
    if alloy is not None:
        symbols = atoms.get_chemical_symbols()
        symbols[::4] = [alloy] * len(symbols[::4])
        atoms.set_chemical_symbols(symbols)
    atoms.pbc = periodic
    start = atoms.get_positions()
    cell = atoms.cell.array.copy()
    coord, box, energy, force = [], [], [], []
    for _ in range(nframes):
        strain = 1.0 + 0.02 * rng.standard_normal()
        frame = atoms.copy()
        frame.set_cell(cell * strain, scale_atoms=False)
        frame.set_positions(start * strain + rattle * rng.standard_normal(start.shape))
        frame.calc = EMT()
        coord.append(frame.get_positions())
        box.append(frame.cell.array.copy())
        energy.append(float(frame.get_potential_energy()))
        force.append(frame.get_forces())
    return Frames(
        symbols=tuple(atoms.get_chemical_symbols()),
        coord=np.stack(coord),
        box=np.stack(box) if periodic else None,
        energy=np.asarray(energy),
        force=np.stack(force),
    )


def write_npy(
    folder: Path,
    frames: Frames,
    *,
    type_map: Sequence[str] = METALS,
    sets: Sequence[int] | None = None,
    extra: dict[str, npt.NDArray[np.float64]] | None = None,
) -> str:
    """Write one system in deepmd-kit's NumPy layout.

    Parameters
    ----------
    folder
        The system's folder; made if absent.
    frames
        What to write.
    type_map
        Element of each atom type.
    sets
        Frames in each ``set.NNN`` folder; one set with everything by default.
    extra
        More per-frame arrays by file name, first axis ``nframes`` (``spin``,
        ``fparam``, ...).

    Returns
    -------
    str
        The folder, as an input file names it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    types = [list(type_map).index(symbol) for symbol in frames.symbols]
    (folder / "type.raw").write_text("\n".join(map(str, types)) + "\n")
    (folder / "type_map.raw").write_text("\n".join(type_map) + "\n")
    if frames.box is None:
        (folder / "nopbc").touch()
    n = len(frames)
    arrays = {"coord": frames.coord, "force": frames.force, "energy": frames.energy}
    if frames.box is not None:
        arrays["box"] = frames.box
    arrays.update(extra or {})
    start = 0
    for number, size in enumerate(sets if sets is not None else [n]):
        one = folder / f"set.{number:03d}"
        one.mkdir(exist_ok=True)
        for name, array in arrays.items():
            np.save(one / f"{name}.npy", array[start : start + size].reshape(size, -1))
        start += size
    return str(folder)


def write_lmdb(
    folder: Path,
    systems: Sequence[Frames],
    *,
    type_map: Sequence[str] = METALS,
    extra: dict[str, Sequence[npt.NDArray[np.float64]]] | None = None,
) -> str:
    """Write several systems as one LMDB data set of deepmd-kit.

    Parameters
    ----------
    folder
        The LMDB folder; must not exist.
    systems
        Systems, whose frames are stored one after the other.
    type_map
        Element of each atom type.
    extra
        More per-frame arrays by name (``spin``, ``force_mag``, ...): one array for
        each system, first axis ``nframes``.

    Returns
    -------
    str
        The folder, as an input file names it.
    """
    import lmdb
    import msgpack  # type: ignore[import-untyped]

    def packed(array: npt.NDArray[Any]) -> dict[str, Any]:
        return {
            "type": str(array.dtype),
            "shape": list(array.shape),
            "data": array.tobytes(),
        }

    nlocs: list[int] = []
    system_ids: list[int] = []
    environment = lmdb.open(str(folder), map_size=1 << 30)
    with environment.begin(write=True) as transaction:
        for number, frames in enumerate(systems):
            types = np.asarray(
                [list(type_map).index(symbol) for symbol in frames.symbols], np.int64
            )
            box = frames.box if frames.box is not None else np.zeros((len(frames), 9))
            for i in range(len(frames)):
                record = {
                    "atom_types": packed(types),
                    "coords": packed(frames.coord[i]),
                    "cells": packed(box[i].reshape(3, 3)),
                    "energies": packed(frames.energy[i : i + 1]),
                    "forces": packed(frames.force[i]),
                }
                for name, arrays in (extra or {}).items():
                    record[name] = packed(arrays[number][i])
                transaction.put(
                    format(len(nlocs), "012d").encode(), msgpack.packb(record)
                )
                nlocs.append(len(types))
                system_ids.append(number)
        counts = np.bincount(
            [list(type_map).index(s) for s in systems[0].symbols],
            minlength=len(type_map),
        )
        metadata = {
            "nframes": len(nlocs),
            "frame_idx_fmt": "012d",
            "type_map": list(type_map),
            "frame_nlocs": nlocs,
            "frame_system_ids": system_ids,
            "system_info": {"natoms": [int(count) for count in counts]},
        }
        transaction.put(b"__metadata__", msgpack.packb(metadata))
    environment.close()
    return str(folder)


def demo_input(root: Path, *, steps: int = 40) -> Path:
    """Write the demo: three metals, one task each, and the input that trains them.

    The first task has two systems of different size, so that its graph meets
    batches of one large frame and of several small ones. The fitting nets differ
    in width: three tasks, three graphs.

    Parameters
    ----------
    root
        Folder for the data and ``input.json``; made if absent.
    steps
        Training steps.

    Returns
    -------
    pathlib.Path
        The input file.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for number, metal in enumerate(METALS):
        large = emt_frames(metal, 12, repeat=(2, 2, 2), seed=number)
        systems = [write_npy(root / "data" / metal / "large", large)]
        if number == 0:
            small = emt_frames(metal, 24, repeat=(1, 1, 1), seed=10 + number)
            systems.append(write_npy(root / "data" / metal / "small", small))
        tasks[metal] = {"width": 24 + 8 * number, "systems": systems}
    content = {
        "model": {
            "shared_dict": {
                "type_map": list(METALS),
                "descriptor": {
                    "type": "se_atten_v2",
                    "sel": 40,
                    "rcut_smth": 3.0,
                    "rcut": 4.0,
                    "neuron": [8, 16],
                    "axis_neuron": 4,
                    "attn_layer": 0,
                    "seed": 1,
                },
            },
            "model_dict": {
                name: {
                    "type_map": "type_map",
                    "descriptor": "descriptor",
                    "fitting_net": {"neuron": [task["width"]] * 2, "seed": 1},
                }
                for name, task in tasks.items()
            },
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5},
        "loss_dict": {
            name: {
                "type": "ener",
                "start_pref_e": 0.02,
                "limit_pref_e": 1,
                "start_pref_f": 100,
                "limit_pref_f": 1,
            }
            for name in tasks
        },
        "training": {
            "enable_compile": True,
            "data_dict": {
                name: {
                    "training_data": {
                        "systems": task["systems"],
                        "batch_size": "auto:32",
                    }
                }
                for name, task in tasks.items()
            },
            "model_prob": dict.fromkeys(tasks, 1.0),
            "numb_steps": steps,
            "disp_freq": max(1, steps // 4),
            "save_freq": steps,
            "seed": 1,
        },
    }
    root.mkdir(parents=True, exist_ok=True)
    path = root / "input.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
