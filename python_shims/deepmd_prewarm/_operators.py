# SPDX-License-Identifier: LGPL-3.0-or-later
"""The registered operators, by what a compiler must know of them."""

from __future__ import annotations

import torch

_ops = torch.ops.deepmd

#: Gives memory back: reading a tensor after it is an error.
RELEASING = (_ops.release_trace_inputs.default, _ops.release_trace_inputs.list)
#: Operators that act on the process: traced as calls, run when the graph runs.
ACTING = (
    *RELEASING,
    _ops.warmup_compiled.default,
    _ops.warmup_compiled.list,
    _ops.safe_empty_cache.default,
    _ops.sync_ranks.default,
)
#: Operators that return Python values, which no graph can hold.
ASKING = (
    _ops.explain_release.default,
    _ops.cache_bytes.default,
    _ops.scalarize_losses.default,
    _ops.prewarm_library.default,
)
