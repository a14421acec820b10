# SPDX-License-Identifier: LGPL-3.0-or-later
"""Compile every task before step 1, free what compiling needed.

``import deepmd_prewarm`` costs nothing: it loads neither torch nor the operator
library and never raises, so that an entry point may import it in every process.
The first use of a public name loads both, and raises ``ImportError`` with the
way out if the library does not fit the running torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_prewarm._library import library_path, load
    from deepmd_prewarm.agreement import (
        agree,
        agree_to_degrade,
        sync_ranks,
        together,
    )
    from deepmd_prewarm.audit import Audit, audit
    from deepmd_prewarm.ops import (
        cache_bytes,
        explain_release,
        release_trace_inputs,
        safe_empty_cache,
        scalarize_losses,
    )
    from deepmd_prewarm.prewarm import PrewarmTask, prewarm
    from deepmd_prewarm.report import PrewarmReport
    from deepmd_prewarm.tasks import (
        CompiledTask,
        keep_alive,
        trace_inputs,
        warmup_compiled,
    )

    __version__: str

# Public name -> the module that has it.
_HOME = {
    "Audit": "audit",
    "CompiledTask": "tasks",
    "PrewarmReport": "report",
    "PrewarmTask": "prewarm",
    "agree": "agreement",
    "agree_to_degrade": "agreement",
    "audit": "audit",
    "cache_bytes": "ops",
    "explain_release": "ops",
    "keep_alive": "tasks",
    "library_path": "_library",
    "load": "_library",
    "prewarm": "prewarm",
    "release_trace_inputs": "ops",
    "safe_empty_cache": "ops",
    "scalarize_losses": "ops",
    "sync_ranks": "agreement",
    "together": "agreement",
    "trace_inputs": "tasks",
    "warmup_compiled": "tasks",
}
# What must work when the library is missing or does not fit.
_WITHOUT_LIBRARY = {
    "Audit",
    "PrewarmReport",
    "agree_to_degrade",
    "audit",
    "library_path",
    "load",
}

__all__ = [
    "Audit",
    "CompiledTask",
    "PrewarmReport",
    "PrewarmTask",
    "__version__",
    "agree",
    "agree_to_degrade",
    "audit",
    "cache_bytes",
    "explain_release",
    "keep_alive",
    "library_path",
    "load",
    "prewarm",
    "release_trace_inputs",
    "safe_empty_cache",
    "scalarize_losses",
    "sync_ranks",
    "together",
    "trace_inputs",
    "warmup_compiled",
]


def __getattr__(name: str) -> Any:
    """Find a public name where it lives; load the library if it needs it."""
    if name == "__version__":
        from importlib.metadata import version

        return version("deepmd-prewarm")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WITHOUT_LIBRARY:
        importlib.import_module(f"{__name__}._library").load()
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, found or not yet."""
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """Keeps ``deepmd_prewarm.prewarm`` the function.

    The import system binds a submodule to its package; the submodule
    ``prewarm`` would hide the function of the same name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
