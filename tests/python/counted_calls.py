# SPDX-License-Identifier: LGPL-3.0-or-later
"""Count which kernels the dispatcher really runs, and in which order.

Each operator's kernel is replaced by one that writes its name down, so a call
that a compiler dropped, repeated, moved or ran while tracing shows, whoever
made it: Python, TorchScript's interpreter or generated code.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

#: What the counting kernel of an operator returns; the others return nothing.
_RESULTS = {
    "release_trace_inputs": 8,
    "release_trace_inputs.list": 8,
    "explain_release": ["release"],
    "cache_bytes": (0, 0),
    "scalarize_losses": {"loss": 1.0},
}
OPERATORS = (
    *_RESULTS,
    "safe_empty_cache",
    "sync_ranks",
    "warmup_compiled",
    "warmup_compiled.list",
)
# Registered for this key too: they look at any tensor there is.
_ON_ANY_TENSOR = (
    "release_trace_inputs",
    "release_trace_inputs.list",
    "explain_release",
)


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Yield the list that grows by an operator's name with each real call."""
    calls: list[str] = []
    library = torch.library.Library("deepmd", "IMPL")

    def counting(name: str) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            calls.append(name.partition(".")[0])
            return _RESULTS.get(name)

        return kernel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in OPERATORS:
            keys = ["CompositeExplicitAutograd"]
            if name in _ON_ANY_TENSOR:
                keys.append("BackendSelect")
            for key in keys:
                library.impl(name, counting(name), key, allow_override=True)
    try:
        yield calls
    finally:
        library._destroy()
