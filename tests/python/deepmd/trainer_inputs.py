# SPDX-License-Identifier: LGPL-3.0-or-later
"""Data and inputs of the trainer tests: tiny models on real energies and forces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from deepmd_prewarm.deepmd_kit.demo_data import emt_frames, write_lmdb, write_npy

Input = dict[str, Any]

_TYPES = ("Cu", "Ag")

# 18 neighbours of a face-centred cubic crystal lie within this radius.
_RCUT = {"rcut": 3.7, "rcut_smth": 2.0, "seed": 1}

GRAPH = {
    "type": "se_atten_v2",
    "sel": 30,
    "neuron": [4],
    "axis_neuron": 2,
    "tebd_dim": 2,
    "attn_layer": 0,
    **_RCUT,
}
DENSE = {
    "type": "se_e2_a",
    "sel": [30, 30],
    "neuron": [4],
    "axis_neuron": 2,
    "type_one_side": True,
    **_RCUT,
}


class Data:
    """Folders of systems that differ in what a compiled graph is guarded by."""

    def __init__(self, root: Path) -> None:
        large = emt_frames("Cu", 6, repeat=(1, 1, 2), alloy="Ag", seed=1)
        small = emt_frames("Cu", 9, repeat=(1, 1, 1), seed=2)
        silver = emt_frames("Ag", 6, repeat=(1, 1, 2), seed=3)
        #: 8 atoms: one frame a batch with `batch_size: auto:8`
        self.large = write_npy(root / "large", large, type_map=_TYPES)
        #: 4 atoms in sets of 5, 3 and 1 frames: two frames a batch, or one
        self.small = write_npy(root / "small", small, type_map=_TYPES, sets=(5, 3, 1))
        self.silver = write_npy(root / "silver", silver, type_map=_TYPES)
        rng = np.random.default_rng(5)
        self.conditioned = write_npy(
            root / "conditioned",
            large,
            type_map=_TYPES,
            extra={
                "fparam": rng.standard_normal((6, 2)),
                "aparam": rng.standard_normal((6, 8, 1)),
            },
        )
        moments = rng.standard_normal((6, 8, 3))
        moments[:, ::4] = 0.0  # silver, which has none
        #: stock 3.2.0 reads magnetic moments from LMDB only
        self.magnetic = write_lmdb(
            root / "magnetic.lmdb",
            [large],
            type_map=_TYPES,
            extra={"spin": [moments], "force_mag": [0.1 * moments]},
        )
        self.lmdb = write_lmdb(root / "two_sizes.lmdb", [large, small], type_map=_TYPES)


_LOSS = {
    "type": "ener",
    "start_pref_e": 0.02,
    "limit_pref_e": 1,
    "start_pref_f": 100,
    "limit_pref_f": 1,
}


def _training(steps: int) -> Input:
    return {
        "enable_compile": True,
        "numb_steps": steps,
        "disp_freq": 1,
        "save_freq": 1000,
        "seed": 1,
    }


_LEARNING = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5}


def single(
    descriptor: Input,
    systems: list[str] | str,
    *,
    steps: int = 6,
    batch_size: int | str = "auto:8",
    validation: list[str] | None = None,
    model: Input | None = None,
    training: Input | None = None,
    **sections: Any,
) -> Input:
    """One task."""
    options = _training(steps) | (training or {})
    loss = sections.pop("loss", _LOSS)
    options["training_data"] = {"systems": systems, "batch_size": batch_size}
    if validation:
        options["validation_data"] = {"systems": validation, "batch_size": 1}
    return {
        "model": {
            "type_map": list(_TYPES),
            "descriptor": descriptor,
            "fitting_net": {"neuron": [6], "seed": 1},
        }
        | (model or {}),
        "learning_rate": _LEARNING,
        "loss": loss,
        "training": options,
        **sections,
    }


def multi(
    tasks: dict[str, tuple[str, list[str]]],
    *,
    steps: int = 10,
    validation: dict[str, list[str]] | None = None,
    training: Input | None = None,
    descriptor: Input = GRAPH,
    **sections: Any,
) -> Input:
    """Build several tasks: name -> (fitting net, systems).

    A fitting net is `shared`, or the width of a net of the task's own.
    """
    options = _training(steps) | (training or {})
    options["model_prob"] = dict.fromkeys(tasks, 1.0)
    options["data_dict"] = {}
    models = {}
    for name, (fitting, systems) in tasks.items():
        entry: Input = {"training_data": {"systems": systems, "batch_size": "auto:8"}}
        if validation and name in validation:
            entry["validation_data"] = {"systems": validation[name], "batch_size": 1}
        options["data_dict"][name] = entry
        models[name] = {
            "type_map": "type_map",
            "descriptor": "descriptor",
            "fitting_net": fitting
            if fitting == "shared"
            else {"neuron": [int(fitting)], "seed": 1},
        }
    return {
        "model": {
            "shared_dict": {
                "type_map": list(_TYPES),
                "descriptor": descriptor,
                "shared": {"neuron": [6], "seed": 1},
            },
            "model_dict": models,
        },
        "learning_rate": _LEARNING,
        "loss_dict": dict.fromkeys(tasks, _LOSS),
        "training": options,
        **sections,
    }
