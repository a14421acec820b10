# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the operators do while a graph is traced: nothing, and say so in types.

A fake runs instead of the kernel under ``FakeTensorMode`` (``torch.compile``,
``torch.export``, symbolic ``make_fx``). It reads no size and no value; checks
that need only plain arguments are repeated here with the kernel's text.
Imported by `deepmd_prewarm._library.load`, after the operators exist.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from deepmd_prewarm import _inductor
from deepmd_prewarm._operators import ACTING, ASKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ops = torch.ops.deepmd


def _released_bytes(inputs: Sequence[torch.Tensor | None]) -> int | torch.SymInt:
    if all(tensor is None for tensor in inputs):
        return 0
    try:
        context = torch.library.get_ctx()
    except RuntimeError:
        return 0  # meta tensors outside of a FakeTensorMode: nothing to free
    if context._fake_mode.shape_env is None:
        return 0  # a bare FakeTensorMode, no graph is made from it
    return context.new_dynamic_size()


def _warmed(
    task: object, inputs: Sequence[torch.Tensor | None], *, backward: bool = True
) -> None:
    pass


def _emptied(device: torch.device) -> None:
    pass


def _met(group_name: str, phase: str, error: str = "", timeout_s: float = 0.0) -> None:
    if not timeout_s >= 0.0:
        raise ValueError(
            "sync_ranks: timeout_s must be a number of seconds >= 0 (0: no limit), "
            f"got {timeout_s:g}."
        )


def _untraceable(op: torch._ops.OpOverload) -> Callable[..., None]:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise DataDependentOutputException(op)

    return refuse


def _with_inductor(fake: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fake)
    def traced(*args: Any, **kwargs: Any) -> Any:
        _inductor.register()
        return fake(*args, **kwargs)

    return traced


def _record_only(
    mode: ProxyTorchDispatchMode,
    func: torch._ops.OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Record a call in a ``make_fx`` graph without running it on real tensors."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
        return mode.__torch_dispatch__(func, types, args, kwargs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return mode.__torch_dispatch__(func, types, args, kwargs)


_FAKES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    _ops.release_trace_inputs.default: _released_bytes,
    _ops.release_trace_inputs.list: _released_bytes,
    _ops.warmup_compiled.default: _warmed,
    _ops.warmup_compiled.list: _warmed,
    _ops.safe_empty_cache.default: _emptied,
    _ops.sync_ranks.default: _met,
    **{op: _untraceable(op) for op in ASKING},
}
for _op, _fake in _FAKES.items():
    torch.library.register_fake(_op, _with_inductor(_fake))
for _op in ACTING:
    torch.library.register_torch_dispatch(_op, ProxyTorchDispatchMode, _record_only)
