# SPDX-License-Identifier: LGPL-3.0-or-later
"""Metrics without graphs: what is logged becomes Python scalars at once.

deepmd-kit keeps, after each step and each display, the loss tensors of every task
(`EnergyLoss.l2_l`, `l2_more`, the step's payload), and with them an autograd graph
and the batch it started from. Here the metrics are scalars (one transfer per
device), the loss objects and the payload keep detached values only, and after each
other task's contribution the free device memory goes back to the driver. The numbers
that `lcurve.out` gets are the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .faults import guarded

__all__ = ["METHODS", "activate", "forget_graphs", "install"]

_ACTIVE = "_deepmd_prewarm_active"

#: Methods of the trainer that are wrapped here.
METHODS = (
    "collect_display_results",
    "evaluate_training",
    "evaluate_validation",
    "train_step",
)


def install(trainer_class: Any) -> None:
    """Wrap the trainer's display methods; each trainer is unchanged until `activate`.

    Parameters
    ----------
    trainer_class
        `deepmd.pt_expt.train.training.Trainer`.
    """
    _wrap(trainer_class, "evaluate_training", _evaluating)
    _wrap(trainer_class, "evaluate_validation", _evaluating)
    _wrap(trainer_class, "collect_display_results", _displaying)
    _wrap(trainer_class, "train_step", _stepping)


def activate(trainer: Any) -> None:
    """Let a trainer that has been prewarmed log without graphs.

    Parameters
    ----------
    trainer
        A trainer whose class `install` has seen.
    """
    trainer.__dict__[_ACTIVE] = True


def forget_graphs(loss: Any) -> None:
    """Detach what a loss object remembers of its last call.

    Parameters
    ----------
    loss
        A loss of deepmd-kit; any attribute that is a tensor, or a dict with
        tensors, is looked at.
    """
    for name, value in vars(loss).items():
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                setattr(loss, name, value.detach())
        elif isinstance(value, dict):
            detached = _without_graphs(value)
            if detached is not value:
                setattr(loss, name, detached)


def _scalars(more_loss: Mapping[str, Any]) -> dict[str, float]:
    from deepmd_prewarm.ops import scalarize_losses

    # deepmd-kit leaves out what contains "l2_", the operator what begins so.
    kept = {name: value for name, value in more_loss.items() if "l2_" not in name}
    return scalarize_losses(kept, skip_prefixes=[])


def _without_graphs(values: dict[str, Any]) -> dict[str, Any]:
    if not any(isinstance(v, torch.Tensor) and v.grad_fn for v in values.values()):
        return values
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _wrap(
    owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))


def _evaluating(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def evaluated(self: Any, task: Any, step: int, step_result: Any) -> Any:
        if not _is_active(self):
            return evaluate(self, task, step, step_result)
        if step_result is not None and step_result.task_key == task.key:
            with guarded("metrics to scalars"):
                payload = step_result.payload
                payload["more_loss"] = _scalars(payload["more_loss"])
        with _scalar_outputs(self._unwrapped):
            results = evaluate(self, task, step, step_result)
        with guarded("memory after a display"):
            forget_graphs(self.losses[task.key])
            # None: not the task of this step, so its forward ran for the display.
            if step_result is None:
                from deepmd_prewarm.ops import safe_empty_cache

                safe_empty_cache(_device_of(self))
        return results

    return evaluated


@contextmanager
def _scalar_outputs(wrapper: torch.nn.Module) -> Iterator[None]:
    """Let a display's forward return scalars and detached values only."""

    def reduce(_module: Any, _inputs: Any, output: Any) -> Any:
        with guarded("metrics to scalars"):
            prediction, loss, more_loss = output
            if more_loss is None:
                return output
            return _without_graphs(prediction), loss.detach(), _scalars(more_loss)
        return output

    handle = wrapper.register_forward_hook(reduce)
    try:
        yield
    finally:
        handle.remove()


def _displaying(collect: Callable[..., Any]) -> Callable[..., Any]:
    def collected(self: Any, tasks: Any, **kwargs: Any) -> Any:
        try:
            return collect(self, tasks, **kwargs)
        finally:
            with guarded("memory after a display"):
                for loss in self.losses.values() if _is_active(self) else ():
                    forget_graphs(loss)

    return collected


def _stepping(train_step: Callable[..., Any]) -> Callable[..., Any]:
    def stepped(self: Any, task: Any, step: int) -> Any:
        result = train_step(self, task, step)
        if not _is_active(self):
            return result
        with guarded("memory after a step"):
            forget_graphs(self.losses[task.key])
            payload = result.payload
            payload["loss"] = payload["loss"].detach()
            payload["more_loss"] = _without_graphs(payload["more_loss"])
        return result

    return stepped


def _is_active(trainer: Any) -> bool:
    return _ACTIVE in trainer.__dict__


def _device_of(trainer: Any) -> torch.device:
    for parameter in trainer._unwrapped.parameters():
        return parameter.device
    return torch.device("cpu")
