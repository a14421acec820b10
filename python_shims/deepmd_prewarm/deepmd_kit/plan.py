# SPDX-License-Identifier: LGPL-3.0-or-later
"""What has to be warmed before step 1 of a deepmd-kit trainer, and how.

A task runs as `Trainer.train_step` runs it: a batch of the task's data, converted by
the trainer's own `get_data`, through the module *inside* DistributedDataParallel, in
train mode, to the loss. The module inside compiles the same graphs (deepmd-kit
switches Dynamo's DDP splitting off), and a rank that compiles for minutes neither
enters DDP's collectives nor leaves its reducer waiting for a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .display import forget_graphs
from .faults import guarded
from .shape_classes import Batch, ShapeClass, shape_classes, unmoved
from .tracing import digests, recorded_in

if TYPE_CHECKING:
    from deepmd_prewarm.prewarm import PrewarmTask
    from deepmd_prewarm.report import TaskRecord

__all__ = ["Plan"]


def _constants_of(compiled: Any) -> tuple[int, ...]:
    """List the fixed sizes among the inputs of a task's compiled lower."""
    model = compiled.original_model
    sizes = {2, 3, int(model.get_nsel())}  # edge ends, coordinates, neighbours
    sizes |= {int(model.get_dim_fparam()), int(model.get_dim_aparam())}
    for buffer in (compiled._task_buffers or {}).values():
        sizes |= {int(size) for size in buffer.shape}
    return tuple(sorted(size for size in sizes if size > 1))


class _OneBatch:
    """Stands in for a data system while the trainer converts a batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def get_batch(self) -> Batch:
        return self._batch


class Plan:
    """Tasks of one trainer. Making it reads no batch and compiles nothing.

    Parameters
    ----------
    trainer
        A deepmd-kit trainer whose tasks have not run yet.

    Raises
    ------
    AttributeError, TypeError
        If the trainer is not what this plugin knows.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._wrapper: torch.nn.Module = trainer._unwrapped
        self.tasks: list[PrewarmTask] = []
        self._keys: dict[str, str] = {}
        self._constants: dict[str, tuple[int, ...]] = {}
        self._open: ExitStack | None = None
        structures: dict[Any, int] = {}
        for key in trainer.model_keys:
            compiled = self._wrapper.model[key]
            # Read here, so that a trainer we do not know is told before a batch
            # is drawn.
            structure = structures.setdefault(compiled._structure_key, len(structures))
            dict(compiled._compiled_lower_by_mode)
            self._constants[key] = _constants_of(compiled)
            modes = {True: self._train_classes(key)}
            if compiled._compile_eval:
                modes[False] = self._eval_classes(key)
            for training, classes in modes.items():
                if classes:
                    self._add(key, compiled, structure, training, classes)

    def _train_classes(self, key: str) -> list[tuple[bool, ShapeClass]]:
        data = self._trainer.training_data_by_task[key]
        classes = shape_classes(data, constants=self._constants[key])
        return [(True, one) for one in classes]

    def _eval_classes(self, key: str) -> list[tuple[bool, ShapeClass]]:
        """List what a display evaluates, and what full validation does."""
        trainer = self._trainer
        classes = []
        if trainer.multi_task:
            classes += self._train_classes(key)
        validation = trainer.validation_data_by_task[key]
        if validation is not None:
            full = trainer.full_validator is not None
            classes += [
                (False, one)
                for one in shape_classes(
                    validation,
                    also_frames=(1, 2) if full else (),
                    constants=self._constants[key],
                )
            ]
        return classes

    def _add(
        self,
        key: str,
        compiled: Any,
        structure: int,
        training: bool,
        classes: list[tuple[bool, ShapeClass]],
    ) -> None:
        from deepmd_prewarm.prewarm import PrewarmTask

        name = key if training else f"{key}/eval"
        self._keys[name] = key

        def graph() -> str | None:
            lower = compiled._compiled_lower_by_mode.get(training)
            digest = digests.of(lower) if lower is not None else None
            # Two models of one architecture have the same code and each its own
            # graph: tell them apart, equally on all ranks.
            return None if digest is None else f"{digest}-{structure}"

        self.tasks.append(
            PrewarmTask(
                name=name,
                fn=self._step_of(key, training),
                samples=lambda: self._samples(key, classes),
                modules=(compiled,),
                mode="train" if training else "eval",
                graph=graph,
            )
        )

    def _step_of(self, key: str, training: bool) -> Callable[..., torch.Tensor]:
        trainer, wrapper = self._trainer, self._wrapper

        def step(**batch: Any) -> torch.Tensor:
            # A display evaluates in eval mode; DDP itself stays as it is.
            wrapper.train(training)
            try:
                _prediction, loss, _more_loss = wrapper(**batch)
            finally:
                wrapper.train(True)
                forget_graphs(trainer.losses[key])
            return loss

        return step

    def _samples(
        self, key: str, classes: list[tuple[bool, ShapeClass]]
    ) -> Iterator[dict[str, Any]]:
        trainer = self._trainer
        for is_train, one in classes:
            by_task = (
                trainer.training_data_by_task
                if is_train
                else trainer.validation_data_by_task
            )
            data, batch = by_task[key], one.draw()
            by_task[key] = _OneBatch(batch)
            try:
                inputs, labels = trainer.get_data(is_train=is_train, task_key=key)
            finally:
                by_task[key] = data
            del batch
            sample = {
                **inputs,
                "label": labels,
                "cur_lr": trainer.scheduler.get_last_lr()[0],
                "task_key": key,
            }
            del inputs, labels
            yield sample
            del sample

    def before_task(self, task: PrewarmTask, record: TaskRecord) -> None:
        """Remember where the task's data stand, and book its traces.

        Parameters
        ----------
        task, record
            The task whose turn it is.
        """
        trainer, key = self._trainer, self._keys[task.name]
        self._open = ExitStack()
        self._open.enter_context(
            unmoved(
                trainer.training_data_by_task[key], trainer.validation_data_by_task[key]
            )
        )
        self._open.enter_context(recorded_in(record))

    def after_task(self, task: PrewarmTask, record: TaskRecord) -> None:
        """Put the data back and drop what only tracing needed.

        Parameters
        ----------
        task, record
            The task whose turn it was.
        """
        if self._open is not None:
            self._open.close()
            self._open = None
        key = self._keys[task.name]
        with guarded("releasing a task's trace-time buffers"):
            self._drop_loss_values(key)
            self._release_task_buffers(self._wrapper.model[key], record)

    def _drop_loss_values(self, key: str) -> None:
        """Take the values away again: before step 1 a loss has none."""
        loss = self._trainer.losses[key]
        for name, value in list(vars(loss).items()):
            is_metrics = isinstance(value, dict) and any(
                isinstance(one, torch.Tensor) for one in value.values()
            )
            if isinstance(value, torch.Tensor) or is_metrics:
                delattr(loss, name)

    def _release_task_buffers(self, compiled: Any, record: TaskRecord) -> None:
        """Free the copies of per-task buffers that only the trace needed."""
        from deepmd_prewarm.ops import release_trace_inputs

        needed = {True, False} if compiled._compile_eval else {True}
        if compiled._task_buffers is None or not needed.issubset(
            compiled._compiled_lower_by_mode
        ):
            return
        buffers = list(compiled._task_buffers.values())
        record.watch(buffers)
        compiled._task_buffers = None
        release_trace_inputs(buffers)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put data, random streams and module modes back, also on error."""
        trainer = self._trainer
        modes = [(module, module.training) for module in trainer.wrapper.modules()]
        try:
            with unmoved(
                *trainer.training_data_by_task.values(),
                *trainer.validation_data_by_task.values(),
            ):
                yield
        finally:
            for module, training in modes:
                module.training = training
