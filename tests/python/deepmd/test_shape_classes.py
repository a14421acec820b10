# SPDX-License-Identifier: LGPL-3.0-or-later
"""Every layout of deepmd-kit's data is listed, drawn, and nothing moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepmd_prewarm.deepmd_kit.shape_classes import shape_classes, unmoved
from trainer_inputs import Data

_TYPES = ["Cu", "Ag"]


def npy(systems: list[str], batch_size: int | str) -> Any:
    from deepmd.utils.data import DataRequirementItem
    from deepmd.utils.data_system import DeepmdDataSystem

    data = DeepmdDataSystem(systems, batch_size, 1, type_map=_TYPES, trn_all_set=True)
    data.add_data_requirements(
        [
            DataRequirementItem("energy", 1, high_prec=True),
            DataRequirementItem("force", 3, atomic=True),
        ]
    )
    return data


def lmdb(path: str, batch_size: int | str, *, ragged: bool = False) -> Any:
    from deepmd.pt_expt.utils.lmdb_dataset import LmdbDataSystem

    data = LmdbDataSystem(path, _TYPES, batch_size, seed=3, num_workers=1)
    data.use_ragged_batches(ragged)
    return data


def sizes(data: Any, **options: Any) -> list[tuple[int, int]]:
    return [(one.nframes, one.natoms) for one in shape_classes(data, **options)]


def test_each_system_gives_its_batches_and_those_of_a_short_set(
    trainer_data: Data,
) -> None:
    data = npy([trainer_data.large, trainer_data.small], "auto:8")
    assert sizes(data) == [(1, 8), (2, 4), (1, 4)]


def test_systems_of_one_layout_are_one_class(trainer_data: Data) -> None:
    assert sizes(npy([trainer_data.large, trainer_data.silver], 2)) == [(2, 8)]


def test_a_batch_larger_than_its_set_is_the_set(trainer_data: Data) -> None:
    assert sizes(npy([trainer_data.small], 4)) == [(4, 4), (3, 4), (1, 4)]


def test_full_validation_adds_one_frame_and_several(trainer_data: Data) -> None:
    data = npy([trainer_data.large], 3)
    assert sizes(data, also_frames=(1, 2)) == [(3, 8), (1, 8), (2, 8)]


@pytest.mark.parametrize("batch_size", ["auto:8", 4, "mixed:2"])
def test_a_draw_has_the_size_that_its_class_names(
    trainer_data: Data, batch_size: int | str
) -> None:
    data = npy([trainer_data.large, trainer_data.small], batch_size)
    with unmoved(data):
        for one in shape_classes(data):
            batch = one.draw()
            assert batch["coord"].shape == (one.nframes, 3 * one.natoms)


def test_lmdb_gives_a_batch_and_a_remainder_for_each_number_of_atoms(
    trainer_data: Data,
) -> None:
    # 9 frames of 4 atoms and 6 of 8
    assert sizes(lmdb(trainer_data.lmdb, 4)) == [(4, 4), (1, 4), (4, 8), (2, 8)]


def test_concatenated_lmdb_batches_are_one_class_for_each_pattern(
    trainer_data: Data,
) -> None:
    data = lmdb(trainer_data.lmdb, "mix:12", ragged=True)
    classes = shape_classes(data)
    assert {one.kind for one in classes} == {"concatenated"}
    for one in classes:
        batch = one.draw()
        assert batch["coord"].shape[0] == one.natoms
        assert len(batch["n_node"]) == one.nframes


def test_few_frames_that_equal_a_constant_size_are_classes_of_their_own(
    trainer_data: Data,
) -> None:
    # edge_index has 2 rows and edge_vec 3 columns: Dynamo takes equal sizes for one.
    data = lmdb(trainer_data.lmdb, "mix:12", ragged=True)
    assert {one.nframes for one in shape_classes(data)} == {1, 2, 3}


def test_drawing_leaves_the_sampler_of_lmdb_data_alone(trainer_data: Data) -> None:
    drawn, untouched = (lmdb(trainer_data.lmdb, 4) for _ in range(2))
    for one in shape_classes(drawn):
        one.draw()
    for _ in range(6):
        np.testing.assert_array_equal(
            drawn.get_batch()["coord"], untouched.get_batch()["coord"]
        )


@pytest.mark.parametrize("batches_before", [0, 3])
def test_what_training_draws_next_is_what_it_would_have_drawn(
    trainer_data: Data, batches_before: int
) -> None:
    from deepmd.utils import random as dp_random

    def following(draw: bool) -> list[np.ndarray]:
        dp_random.seed(11)
        data = npy([trainer_data.large, trainer_data.small], "auto:8")
        for _ in range(batches_before):
            data.get_batch()
        if draw:
            with unmoved(data):
                for one in shape_classes(data):
                    one.draw()
        return [data.get_batch()["coord"] for _ in range(8)]

    for drawn, untouched in zip(following(True), following(False), strict=True):
        np.testing.assert_array_equal(drawn, untouched)


def test_a_set_that_warming_loaded_is_given_back(trainer_data: Data) -> None:
    data = npy([trainer_data.large], 1)
    with unmoved(data):
        shape_classes(data)[0].draw()
        assert hasattr(data.data_systems[0], "batch_set")
    assert not hasattr(data.data_systems[0], "batch_set")


def test_data_are_put_back_when_a_draw_fails(trainer_data: Data) -> None:
    data = npy([trainer_data.large], 1)
    data.get_batch()
    place = data.data_systems[0].iterator
    with pytest.raises(OSError, match="gone"), unmoved(data):
        data.get_batch()
        raise OSError("gone")
    assert data.data_systems[0].iterator == place


def test_data_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"LmdbDataSystem, got pathlib"):
        shape_classes(tmp_path)
