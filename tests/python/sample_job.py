# SPDX-License-Identifier: LGPL-3.0-or-later
"""A job whose trace-time inputs are large and whose graphs are small.

Each task traces its loss with its first batch, compiles it, and shows its loss once.
Without the plugin the display keeps the loss as a tensor, as trainers do; its graph
holds the batch.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from deepmd_prewarm.prewarm import PrewarmTask, prewarm
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

COLUMNS = 256


class Task:
    """A small network whose loss is traced when it is first called."""

    def __init__(self, number: int, backend: str) -> None:
        torch.manual_seed(number)
        self.net = torch.nn.Linear(COLUMNS, 2 + number % 7)
        self.backend = backend
        self.compiled: Any = None

    @staticmethod
    def eager(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.linear(x, w, b)).square().sum()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.net.weight, self.net.bias)
        if self.compiled is None:
            traced = make_fx(self.eager, tracing_mode="symbolic")(x, *weights)
            self.compiled = torch.compile(traced, backend=self.backend, dynamic=True)
        return self.compiled(x, *weights)


class Batches:
    """Draws batches of a size and remembers them by weak reference."""

    def __init__(self, nbytes: int) -> None:
        self.rows = max(2, nbytes // 4 // COLUMNS)
        self._drawn: list[StorageWeakRef] = []

    def draw(self) -> torch.Tensor:
        batch = torch.full((self.rows, COLUMNS), 0.01)
        self._drawn.append(StorageWeakRef(batch.untyped_storage()))
        return batch

    def held(self) -> int:
        """Bytes of drawn batches that still have their memory."""
        total = 0
        for ref in self._drawn:
            if not ref.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
                total += 0 if storage is None else storage.nbytes()
        return total


def _value(loss: torch.Tensor | float) -> float:
    return loss.item() if isinstance(loss, torch.Tensor) else loss


def with_plugin(
    count: int, nbytes: int, backend: str, *, keep_loss: bool = False
) -> dict[str, Any]:
    """Prewarm, then show each task's loss as a float; return what was held."""
    from deepmd_prewarm import scalarize_losses

    batches, shown, held = Batches(nbytes), {}, []
    tasks = [Task(number, backend) for number in range(count)]
    prewarm(
        [
            PrewarmTask(f"task {number}", task.loss, lambda: iter([batches.draw()]))
            for number, task in enumerate(tasks)
        ],
        progress=False,
        before_task=lambda *_: held.append(batches.held()),
    )
    held.append(batches.held())
    for number, task in enumerate(tasks):
        losses = {"rmse": task.loss(batches.draw())}
        shown[number] = losses if keep_loss else scalarize_losses(losses)
        del losses
        gc.collect()
        held.append(batches.held())
    return {"held": held, "losses": [_value(one["rmse"]) for one in shown.values()]}


def without_plugin(count: int, nbytes: int, backend: str) -> dict[str, Any]:
    """Trace at the first step and show the loss as it is."""
    batches, shown, held = Batches(nbytes), {}, [0]
    tasks = [Task(number, backend) for number in range(count)]
    for number, task in enumerate(tasks):
        shown[number] = {"rmse": task.loss(batches.draw())}
        gc.collect()
        held.append(batches.held())
    return {"held": held, "losses": [_value(one["rmse"]) for one in shown.values()]}
