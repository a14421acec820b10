# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a display logs are scalars; what it leaves are values without graphs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepmd_prewarm import ops
from deepmd_prewarm.deepmd_kit import display


class Loss:
    """Remembers its last call as deepmd-kit's EnergyLoss does."""

    def __init__(self) -> None:
        self.start_pref_e = 1.0

    def __call__(self, value: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        self.l2_l = value
        self.l2_more = {"rmse_e": value * 2, "l2_ener_loss": value * 3}
        return self.l2_l, self.l2_more


class Wrapper(torch.nn.Module):
    def __init__(self, losses: dict[str, Loss]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.losses = losses

    def forward(self, x: torch.Tensor, key: str) -> Any:
        loss, more_loss = self.losses[key](self.weight * x)
        return {"energy": self.weight * x}, loss, more_loss


def new_trainer_class() -> Any:
    """A class of its own each time: `install` changes it."""

    class Trainer:
        def __init__(self) -> None:
            self.losses = {"a": Loss(), "b": Loss()}
            self._unwrapped = Wrapper(self.losses)
            self.seen: list[Any] = []

        def train_step(self, task: Any, step: int) -> Any:
            _, loss, more_loss = self._unwrapped(torch.ones(()), task.key)
            loss.backward()
            return SimpleNamespace(
                task_key=task.key, payload={"loss": loss, "more_loss": more_loss}
            )

        def evaluate_training(self, task: Any, step: int, result: Any) -> Any:
            if result is not None and result.task_key == task.key:
                return self._floats(result.payload["more_loss"])
            _, _, more_loss = self._unwrapped(torch.ones(()), task.key)
            return self._floats(more_loss)

        def evaluate_validation(self, task: Any, step: int, result: Any) -> Any:
            _, _, more_loss = self._unwrapped(torch.ones(()), task.key)
            return self._floats(more_loss)

        def collect_display_results(self, tasks: Any, **kwargs: Any) -> Any:
            result, active = kwargs["step_result"], kwargs["active_task"]
            return {
                task.key: (
                    self.evaluate_training(task, 0, result if task is active else None),
                    self.evaluate_validation(
                        task, 0, result if task is active else None
                    ),
                )
                for task in tasks
            }

        def _floats(self, more_loss: Any) -> dict[str, float]:
            self.seen.append(more_loss)
            return {k: float(v) for k, v in more_loss.items() if "l2_" not in k}

    return Trainer


def displayed(*, active: bool) -> tuple[Any, Any, Any]:
    trainer_class = new_trainer_class()
    display.install(trainer_class)
    trainer = trainer_class()
    if active:
        display.activate(trainer)
    tasks = [SimpleNamespace(key="a"), SimpleNamespace(key="b")]
    result = trainer.train_step(tasks[0], 0)
    shown = trainer.collect_display_results(
        tasks, active_task=tasks[0], step=0, step_result=result
    )
    return trainer, result, shown


def graphs(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    return isinstance(value, dict) and any(graphs(one) for one in value.values())


def test_the_metrics_are_the_same_numbers_as_without_the_plugin() -> None:
    shown = displayed(active=True)[2]
    assert shown == displayed(active=False)[2]
    assert shown == {"a": ({"rmse_e": 0.2}, {"rmse_e": 0.2})} | {
        "b": ({"rmse_e": 0.2}, {"rmse_e": 0.2})
    }


def test_training_and_validation_of_every_task_log_python_scalars() -> None:
    trainer = displayed(active=True)[0]
    assert len(trainer.seen) == 4
    for more_loss in trainer.seen:
        assert {name: type(value) for name, value in more_loss.items()} == {
            "rmse_e": float
        }


def test_no_graph_survives_in_losses_and_step_result() -> None:
    trainer, result, _ = displayed(active=True)
    for loss in trainer.losses.values():
        assert not any(graphs(value) for value in vars(loss).values())
        assert float(loss.l2_l) == pytest.approx(0.1)  # the values stay readable
    assert not graphs(result.payload)


def test_a_trainer_that_was_not_prewarmed_is_unchanged() -> None:
    trainer, result, _ = displayed(active=False)
    assert graphs(vars(trainer.losses["b"]))
    assert graphs(result.payload)
    assert all(graphs(more_loss) for more_loss in trainer.seen)


def test_the_cache_is_cleared_after_other_tasks_through_the_guarded_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(ops, "safe_empty_cache", devices.append)
    displayed(active=True)
    # training and validation of task b; the active task a needs none
    assert devices == [torch.device("cpu")] * 2


def test_a_fault_of_the_operator_leaves_the_display_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("operator is gone")

    monkeypatch.delenv("DP_PREWARM_STRICT", raising=False)
    monkeypatch.setattr(ops, "scalarize_losses", broken)
    monkeypatch.setattr("deepmd_prewarm.deepmd_kit.faults._told", set())
    shown = displayed(active=True)[2]
    assert shown == displayed(active=False)[2]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "metrics to scalars failed and is left out (OSError: operator" in said[0]


def test_no_other_cache_call_is_in_the_package() -> None:
    root = Path(ops.__file__).parent
    unguarded = re.compile(r"(?<!safe_)empty_cache\(")
    assert [
        path.name for path in root.rglob("*.py") if unguarded.search(path.read_text())
    ] == []
