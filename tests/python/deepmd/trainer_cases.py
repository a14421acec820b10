# SPDX-License-Identifier: LGPL-3.0-or-later
"""The trainings of the matrix: each kind of model, data and option once."""

from __future__ import annotations

from typing import Any

from trainer_inputs import DENSE, GRAPH, Data, multi, single

Case = dict[str, Any]


def cases(data: Data) -> list[Case]:
    """All cases; one may start from the checkpoint of a case before it."""
    several = {
        # two layouts and a third one in a short set; shares its graph with `two`
        "one": ("shared", [data.large, data.small]),
        "two": ("shared", [data.silver]),
        "three": ("5", [data.large]),
    }
    several_input = multi(several, validation={"one": [data.small]})
    # Full validation cuts batches of its own, and evaluates compiled.
    evaluating = {
        "compiled_infer": True,
        "full_validation": True,
        "validation_freq": 3,
        "full_val_start": 0.0,
    }
    conditioned = {
        "fitting_net": {
            "neuron": [6],
            "seed": 1,
            "numb_fparam": 2,
            "numb_aparam": 1,
        }
    }
    magnetic = {
        "loss": {
            "type": "ener_spin",
            "start_pref_e": 0.02,
            "limit_pref_e": 1,
            "start_pref_fr": 100,
            "limit_pref_fr": 1,
            "start_pref_fm": 10,
            "limit_pref_fm": 1,
        },
        "model": {"spin": {"use_spin": [True, False], "virtual_scale": [0.3]}},
    }
    plain = single(GRAPH, data.lmdb, training={"enable_ema": True, "ema_decay": 0.9})
    return [
        {"name": "several tasks", "backend": "aot_eager", "input": several_input},
        {
            "name": "restart",
            "input": multi(several, steps=14, validation={"one": [data.small]}),
            "options": {"restart": "{before}/several tasks/model.ckpt.pt"},
        },
        {
            "name": "dense",
            "input": single(
                DENSE,
                [data.large, data.small],
                validation=[data.small, data.large],
                validating=evaluating,
            ),
        },
        {"name": "lmdb and ema", "input": plain},
        {
            "name": "ragged lmdb and zero",
            "grouped": True,
            "input": single(
                GRAPH, data.lmdb, batch_size="mix:12", training={"zero_stage": 1}
            ),
        },
        {
            "name": "frame and atom parameters",
            "input": single(GRAPH, [data.conditioned], model=conditioned),
        },
        {"name": "spin", "input": single(DENSE, data.magnetic, **magnetic)},
        {
            "name": "init-model",
            "input": single(GRAPH, [data.large, data.silver], batch_size="mixed:2"),
            "options": {"init_model": "{before}/lmdb and ema/model.ckpt.pt"},
        },
        {
            "name": "finetune",
            "input": single(GRAPH, [data.silver, data.small]),
            "options": {"finetune": "{before}/lmdb and ema/model.ckpt.pt"},
        },
    ]
