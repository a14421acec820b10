# SPDX-License-Identifier: LGPL-3.0-or-later
"""No byte of a task's samples is held once its turn is over.

The large version, with resident memory: tests/bench/bench_sample_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sample_job
import torch

MB = 2**20


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_nothing_of_a_sample_is_held_after_its_task_and_its_display() -> None:
    seen = sample_job.with_plugin(3, 2 * MB, "aot_eager")
    assert seen["held"] == [0] * 7  # before each task, after all, after each display


def test_a_kept_loss_would_hold_the_batch_of_every_task() -> None:
    seen = sample_job.with_plugin(3, 2 * MB, "aot_eager", keep_loss=True)
    assert seen["held"] == [0, 0, 0, 0, 2 * MB, 4 * MB, 6 * MB]


def test_without_the_plugin_every_task_holds_its_sample_and_losses_are_equal() -> None:
    stock = sample_job.without_plugin(3, 2 * MB, "aot_eager")
    assert stock["held"] == [0, 2 * MB, 4 * MB, 6 * MB]
    torch._dynamo.reset()
    ours = sample_job.with_plugin(3, 2 * MB, "aot_eager")
    assert ours["losses"] == stock["losses"]
