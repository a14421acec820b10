# SPDX-License-Identifier: LGPL-3.0-or-later
"""Typed wrappers of the operators in ``torch.ops.deepmd``.

Each does what its operator does, checks its arguments as Python users write
them, and adds what only Python can see. Inside ``torch.compile``, export and
tracing they are the bare operators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from deepmd_prewarm import _library
from deepmd_prewarm._holders import Holders

if TYPE_CHECKING:
    from types import FrameType

    from deepmd_prewarm.agreement import sync_ranks
    from deepmd_prewarm.tasks import warmup_compiled

__all__ = [
    "cache_bytes",
    "explain_release",
    "release_trace_inputs",
    "safe_empty_cache",
    "scalarize_losses",
    "sync_ranks",
    "warmup_compiled",
]

# What scalarize_losses takes for one key.
Loss: TypeAlias = torch.Tensor | float | int | Mapping[str, Any] | None

_library.load()


def _no_bridge(*_args: object) -> None:
    """Stand in for the bridge in an installation without it."""


try:
    _scalarize_plain: Callable[..., dict[str, float] | None] = (
        _library.bridge().scalarize_losses
    )
except ImportError:
    _scalarize_plain = _no_bridge


def __getattr__(name: str) -> Any:
    """Find the two wrappers that live with what they need."""
    if name == "warmup_compiled":
        from deepmd_prewarm.tasks import warmup_compiled

        return warmup_compiled
    if name == "sync_ranks":
        from deepmd_prewarm.agreement import sync_ranks

        return sync_ranks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def release_trace_inputs(
    inputs: Iterable[torch.Tensor | None],
    *,
    look_for_holders: bool = True,
    frame: FrameType | None = None,
) -> int:
    """Give the memory of trace-time inputs back to the allocator.

    The caller gives up the tensors in ``inputs``: its own variables and the list
    itself. Everything else is protected, storage by storage: a view or a
    ``detach()`` outside the list, what autograd saved, borrowed or shared memory
    and, unlike the bare operator, a ``Parameter`` and a tensor that a module, a
    traced graph, a hook, another frame or any other Python object still holds.
    What is refused stays exactly as it was.

    Parameters
    ----------
    inputs : list or tuple of Tensor or None
        Tensors of any shape, dtype and device; repetitions and None are fine.
    look_for_holders : bool, default: True
        False leaves out the look at Python holders, for a caller who knows that
        nobody else reads the tensors.
    frame : FrameType, optional
        The frame whose variables are given up; that of the caller by default.

    Returns
    -------
    int
        Bytes freed. A later access to the data of a freed tensor raises
        ``RuntimeError``; its shape, dtype and device stay readable.

    Raises
    ------
    TypeError
        If an entry is neither a tensor nor None. Nothing is released then.

    Notes
    -----
    Does not block, not collective, safe from several threads. The look costs
    microseconds, and one pass over the objects of the process (40 ms for a
    million) if there are variables that an inner function uses too.
    """
    if _is_traced():
        return int(torch.ops.deepmd.release_trace_inputs(inputs))
    items, _ = _real_tensors("release_trace_inputs", inputs)
    if look_for_holders:
        holders = Holders(items, inputs, frame or sys._getframe(1))
        for index in holders.find():
            items[index] = None
    return int(torch.ops.deepmd.release_trace_inputs.default(items))


def explain_release(
    inputs: Iterable[torch.Tensor | None],
    *,
    look_for_holders: bool = True,
    frame: FrameType | None = None,
) -> list[str]:
    """Tell what `release_trace_inputs` would do with the same arguments.

    Parameters
    ----------
    inputs : list or tuple of Tensor or None
        As for `release_trace_inputs`.
    look_for_holders : bool, default: True
        As for `release_trace_inputs`.
    frame : FrameType, optional
        As for `release_trace_inputs`.

    Returns
    -------
    list of str
        For each entry ``"release"`` or the reason for which it would be kept.

    Raises
    ------
    TypeError
        If an entry is neither a tensor nor None.

    Notes
    -----
    Changes nothing. Where Python objects hold an entry, one pass over the
    objects of the process finds a word for them.
    """
    items, words = _real_tensors("explain_release", inputs)
    if look_for_holders:
        holders = Holders(items, inputs, frame or sys._getframe(1))
        held = holders.find()
        if held:
            # What is kept anyway has a better reason than a name in Python.
            reasons = torch.ops.deepmd.explain_release(items)
            free = [index for index in held if reasons[index] == "release"]
            words.update(holders.describe(free))
            words.update({i: reasons[i] for i in held if i not in free})
            for index in held:
                items[index] = None
    reasons = torch.ops.deepmd.explain_release(items)
    return [words.get(index, reason) for index, reason in enumerate(reasons)]


def safe_empty_cache(device: str | torch.device) -> int:
    """Give the free blocks of a CUDA device's caching allocator to the driver.

    Parameters
    ----------
    device : str or torch.device
        Only ``device.type == "cuda"`` does anything; every other device, no
        driver, CUDA not in use yet and a graph capture under way are no-ops.

    Returns
    -------
    int
        Bytes given back.

    Raises
    ------
    TypeError
        If ``device`` is neither a string nor a ``torch.device``.
    RuntimeError
        If a string names no device.

    Notes
    -----
    Never creates a CUDA context, on no device. Torch's allocator can only empty
    all devices at once: free blocks of another device that this process already
    uses go back too, as in ``torch.cuda.empty_cache``; they are not counted.
    A device that holds no memory is left alone. Waits for the devices.
    """
    device = _device("safe_empty_cache", device)
    if device.type != "cuda" or _is_traced():
        torch.ops.deepmd.safe_empty_cache(device)
        return 0
    before, _ = torch.ops.deepmd.cache_bytes(device)
    torch.ops.deepmd.safe_empty_cache(device)
    after, _ = torch.ops.deepmd.cache_bytes(device)
    return max(0, int(before - after))


def cache_bytes(device: str | torch.device) -> tuple[int, int]:
    """Read the figures of a device's caching allocator.

    Parameters
    ----------
    device : str or torch.device
        Any device.

    Returns
    -------
    reserved : int
        Bytes taken from the driver; 0 where there is no caching allocator.
    allocated : int
        Bytes thereof in use by tensors.

    Raises
    ------
    TypeError
        If ``device`` is neither a string nor a ``torch.device``.

    Notes
    -----
    Creates no context and does not block.
    """
    reserved, allocated = torch.ops.deepmd.cache_bytes(_device("cache_bytes", device))
    return int(reserved), int(allocated)


def scalarize_losses(
    losses: Mapping[str, Loss], skip_prefixes: Sequence[str] | None = None
) -> dict[str, Any]:
    """Turn losses into Python floats.

    Parameters
    ----------
    losses : mapping of str to Tensor, float, int, None or mapping
        Tensors of one element and any real dtype, on any devices. None stands
        for a loss that was not computed. Mappings may be nested.
    skip_prefixes : sequence of str, optional
        Keys with one of these prefixes are left out, at every level. ``l2_`` by
        default.

    Returns
    -------
    dict
        The same keys in the same order, with a float for each tensor or number
        (integers correctly rounded), NaN for None, a dict for each mapping.

    Raises
    ------
    ValueError
        If a tensor has another number of elements than one; names its key.
    TypeError
        If a value is complex, sparse or of an unknown type, or a key is no
        string; names the key.

    Notes
    -----
    One device-to-host copy per device, which waits for it. Holds no graph.
    """
    if type(losses) is dict and not _is_traced():
        plain = _scalarize_plain(losses, skip_prefixes)
        if plain is not None:
            return plain
    prefixes = ("l2_",) if skip_prefixes is None else tuple(skip_prefixes)
    tensors: dict[str, torch.Tensor] = {}
    nested = _collect(losses, prefixes, tensors, "")
    values = torch.ops.deepmd.scalarize_losses.default(tensors, [])
    return _fill(nested, values)


def _collect(
    losses: Mapping[str, Loss],
    prefixes: tuple[str, ...],
    tensors: dict[str, torch.Tensor],
    path: str,
) -> dict[str, Any]:
    """Copy the mapping; put tensors aside under a name for error messages."""
    scalars: dict[str, Any] = {}
    for key, value in losses.items():
        if not isinstance(key, str):
            raise TypeError(
                f"scalarize_losses: expected string keys, got {key!r} in "
                f"{path or 'losses'}. Name every loss."
            )
        if key.startswith(prefixes):
            continue
        name = f"{path}.{key}" if path else key
        if isinstance(value, torch.Tensor):
            while name in tensors:  # {"a.b": ..., "a": {"b": ...}}
                name += "'"
            tensors[name] = value
            scalars[key] = _Pending(name)
        elif isinstance(value, Mapping):
            scalars[key] = _collect(value, prefixes, tensors, name)
        elif value is None:
            scalars[key] = float("nan")
        elif isinstance(value, Real) or _is_numpy_scalar(value):
            scalars[key] = float(value)
        else:
            raise TypeError(
                f"scalarize_losses: expected a tensor or a real number for key "
                f"'{name}', got {type(value).__name__}. Convert it or skip the key."
            )
    return scalars


class _Pending(str):
    """The name of a tensor whose value is on its way."""

    __slots__ = ()


def _fill(scalars: dict[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    for key, value in scalars.items():
        if isinstance(value, _Pending):
            scalars[key] = values[value]
        elif isinstance(value, dict):
            _fill(value, values)
    return scalars


def _is_numpy_scalar(value: object) -> bool:
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return kind in tuple("biuf") and getattr(value, "size", 0) == 1


def _is_traced() -> bool:
    return bool(torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def _real_tensors(
    operator: str, inputs: Iterable[torch.Tensor | None]
) -> tuple[list[torch.Tensor | None], dict[int, str]]:
    """Check the entries; leave out subclasses that would dispatch the call.

    Returns the entries and, for those left out, their index and what they are.
    """
    is_list = type(inputs) is list or type(inputs) is tuple
    if not is_list and isinstance(inputs, (torch.Tensor, str, Mapping)):
        raise TypeError(
            f"{operator}: expected a list of tensors or None, got "
            f"{type(inputs).__name__}. Put the tensors into a list."
        )
    items = list(inputs)
    words: dict[int, str] = {}
    for index in range(len(items)):
        kind = type(items[index])
        if kind is torch.Tensor or kind is type(None):
            continue
        if not issubclass(kind, torch.Tensor):
            raise TypeError(
                f"{operator}: expected a tensor or None at index {index}, got "
                f"{kind.__name__}. Leave it out."
            )
        if torch._C._dispatch_keys(items[index]).has(torch._C.DispatchKey.Python):
            words[index] = (
                f"{kind.__name__}: a tensor subclass with a dispatch of its own; "
                "release the tensors that it wraps"
            )
            items[index] = None
    return items, words


def _device(operator: str, device: str | torch.device) -> torch.device:
    if isinstance(device, str):
        return torch.device(device)
    if isinstance(device, torch.device):
        return device
    raise TypeError(
        f"{operator}: expected a device as str or torch.device, got "
        f"{type(device).__name__}. Write 'cuda:0' or torch.device('cuda', 0)."
    )
