# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the entry point `deepmd.pt_expt` names.

deepmd-kit imports this module whenever `deepmd.pt_expt` is imported, and never
calls what it finds. So importing it must do the work, cost next to nothing (no
torch, no trainer: inference and `dp --version` pass here too) and never raise. It
installs one finder that waits for the trainer's module, hooks it once it has been
executed, and takes itself away.

`DP_PREWARM=0` switches everything off.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

__all__ = ["TRAINER_MODULE", "hook", "unhook"]

#: The module of deepmd-kit whose `Trainer` is hooked.
TRAINER_MODULE = "deepmd.pt_expt.train.training"


def switched_off() -> bool:
    """Whether `DP_PREWARM` says no.

    Returns
    -------
    bool
        True for ``0``, ``off``, ``false`` and ``no``.
    """
    return os.environ.get("DP_PREWARM", "1").strip().lower() in {
        "0",
        "off",
        "false",
        "no",
    }


class _HookingLoader(importlib.abc.Loader):
    """Executes the trainer's module with its own loader, then hooks it."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Tracebacks, `inspect` and pickle must find the loader they expect.
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        unhook()  # only now: an import that failed may be tried again
        _hook_trainer(module)


class _TrainerFinder(importlib.abc.MetaPathFinder):
    """Finds one module, through the other finders."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TRAINER_MODULE:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _HookingLoader(spec.loader)
                return spec
        return None


_finder = _TrainerFinder()


def _hook_trainer(module: ModuleType) -> None:
    """Patch the executed module; a fault of ours is told, not raised."""
    try:
        from deepmd_prewarm.agreement import watch_when_initialized
        from deepmd_prewarm.deepmd_kit import trainer

        trainer.install(module)
        # Reading data and statistics come before the first meeting: a rank that
        # dies there shall be missed, too.
        watch_when_initialized()
    except Exception as error:  # deepmd-kit's import must not fail because of us
        warnings.warn(
            f"deepmd-prewarm: cannot hook {TRAINER_MODULE} "
            f"({type(error).__name__}: {error}). Training goes on without it.",
            RuntimeWarning,
            stacklevel=2,
        )


def hook() -> None:
    """Wait for deepmd-kit's trainer, or hook it if it is there already.

    Importing this module has called it. Idempotent; never raises.
    """
    if switched_off():
        return
    module = sys.modules.get(TRAINER_MODULE)
    if module is not None:
        # A module that is still executing has no `Trainer` to hook yet.
        if hasattr(module, "Trainer"):
            _hook_trainer(module)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def unhook() -> None:
    """Stop waiting. What has been hooked stays hooked."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


hook()
