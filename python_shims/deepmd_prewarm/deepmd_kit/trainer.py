# SPDX-License-Identifier: LGPL-3.0-or-later
"""Hooks in deepmd-kit's pt_expt trainer: prewarm before step 1, count at the end.

Written for deepmd-kit 3.2.0. What a release must have is named in `misfit`; one that
lacks a name is told by name, and training goes on unchanged on all ranks.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from . import display, faults, tracing
from .entry import switched_off
from .faults import log

__all__ = ["KNOWN_RELEASE", "has_work", "install", "misfit"]

#: The release whose names are used here.
KNOWN_RELEASE = "3.2.0"

_MARK = "_deepmd_prewarm_hooked"
_WATCH = "_deepmd_prewarm_watch"

_TRAINER_NAMES = ("get_data", "on_train_begin", "on_train_end", *display.METHODS)
_MODULE_NAMES = (*tracing.TRACERS, tracing.FINALIZE, "_CompiledModel")


def misfit(module: ModuleType) -> str | None:
    """Tell what this plugin needs of the trainer's module and does not find.

    Parameters
    ----------
    module
        `deepmd.pt_expt.train.training`.

    Returns
    -------
    str or None
        Names, with the release; None if it fits.
    """
    missing = [name for name in _MODULE_NAMES if not hasattr(module, name)]
    missing += [
        f"Trainer.{name}"
        for name in _TRAINER_NAMES
        if not hasattr(module.Trainer, name)
    ]
    if not missing:
        return None
    from importlib.metadata import version

    return (
        f"deepmd-kit {version('deepmd-kit')} has no {', '.join(missing)} "
        f"(known: {KNOWN_RELEASE})"
    )


def has_work(trainer: Any) -> bool:
    """Whether a trainer is going to compile anything.

    Parameters
    ----------
    trainer
        A deepmd-kit trainer.

    Returns
    -------
    bool
        False without `enable_compile`, and where no step is left to train.
    """
    if not getattr(trainer, "enable_compile", False):
        return False
    return getattr(trainer, "num_steps", 1) > getattr(trainer, "start_step", 0)


def install(module: ModuleType) -> None:
    """Patch the trainer class, once.

    Parameters
    ----------
    module
        `deepmd.pt_expt.train.training`, executed.
    """
    trainer_class = module.Trainer
    if getattr(trainer_class, _MARK, False):
        return
    problem = misfit(module)
    if problem is None:
        tracing.install(module)
        display.install(trainer_class)
    _hook_begin(trainer_class, problem)
    _hook_end(trainer_class)
    setattr(trainer_class, _MARK, True)


def _hook_begin(trainer_class: type, problem: str | None) -> None:
    original = trainer_class.on_train_begin  # type: ignore[attr-defined]

    @functools.wraps(original)
    def on_train_begin(self: Any, tasks: Any) -> None:
        original(self, tasks)
        if not switched_off():
            _prewarm(self, problem)

    trainer_class.on_train_begin = on_train_begin  # type: ignore[attr-defined]


def _hook_end(trainer_class: type) -> None:
    original = trainer_class.on_train_end  # type: ignore[attr-defined]

    @functools.wraps(original)
    def on_train_end(self: Any, tasks: Any) -> None:
        original(self, tasks)
        watch = self.__dict__.pop(_WATCH, None)
        if watch is None:
            return
        failed = sys.exc_info()[0] is not None
        with faults.guarded("counting compiled graphs"):
            # A training that failed must not wait for ranks that never come.
            total = watch.finish(0.0 if failed else 30.0)
            if self.rank == 0 and total is not None:
                log.info("deepmd-prewarm: %d graphs compiled from step 1 on.", total)

    trainer_class.on_train_end = on_train_end  # type: ignore[attr-defined]


def _prewarm(trainer: Any, problem: str | None) -> None:
    """Warm all tasks and meet all ranks; or degrade on all of them."""
    if not has_work(trainer):  # on all ranks alike: they have one input file
        with faults.guarded("slowing heartbeats down"):
            from deepmd_prewarm.agreement import rest

            rest()
        return
    try:
        from deepmd_prewarm.agreement_by_store import agree_to_degrade
    except ImportError as error:  # half an installation: nobody can be told
        faults.degrade([f"rank {trainer.rank}: {error}"])
        return
    plan = None
    if problem is None:
        try:
            from deepmd_prewarm import _library
            from deepmd_prewarm.prewarm import prewarm

            from .plan import Plan

            _library.load()
            plan = Plan(trainer)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problems = agree_to_degrade(None, problem)
    tracing.switch(not problems)
    if problems or plan is None:
        faults.degrade(problems, tell=trainer.rank == 0)
        return
    with plan.unchanged():
        report = prewarm(
            plan.tasks,
            report_dir=os.environ.get("DP_PREWARM_REPORT") or None,
            before_task=plan.before_task,
            after_task=plan.after_task,
        )
    if report.degraded:
        return
    log.info(
        "deepmd-prewarm: %d graphs are ready on %d ranks after %.1f s.",
        len(plan.tasks),
        report.world_size,
        report.wall_s,
    )
    display.activate(trainer)
    trainer.__dict__[_WATCH] = report.watch()
