# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a handle on a Python callable calls, holding modules weakly.

The C++ side (``plugin/python_bridge.cpp``) uses `Callee` through ``run``,
``state``, ``remember`` and ``eager_reason``, and `explain` on an exception.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _eager_fallback
from .collective_free import collective_free
from .random_streams import unchanged_random_streams

# (structure, leaves with None where a tensor goes) of the call that the typed
# wrapper is making in this thread; see `structured`.
_call = threading.local()


# A longer container is data, not a collection of models.
_SMALL = 10_000


class Callee:
    """One Python callable with what it may change.

    Parameters
    ----------
    name
        The task's name, for messages.
    fn
        What training will call. Modules in it (itself, a bound self, closure
        cells, defaults, `functools.partial` arguments) are held weakly.
    modules
        Further modules whose parameters and buffers a run may change.
    """

    def __init__(
        self, name: str, fn: Callable[..., Any], modules: Iterable[torch.nn.Module]
    ) -> None:
        self._name = name
        self._fn = hold(fn)
        self._modules = [weakref.ref(module) for module in modules]
        self.eager_reason = ""

    def run(self, inputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Call once; return every tensor of the result."""
        self.eager_reason = ""
        structure = _call.__dict__.pop("structure", None)
        args, kwargs = structure(inputs) if structure else (inputs, {})
        try:
            fn = self._fn()
        except ReferenceError as dead:
            raise RuntimeError(
                f"warmup_compiled: expected the module of task '{self._name}' to be "
                f"alive, but {dead} was deleted. Handles hold modules weakly: keep "
                "the module until training starts."
            ) from None
        result, self.eager_reason = _eager_fallback.call(
            functools.partial(fn, *args, **kwargs), lambda: compiled_in(fn)
        )
        tensors = list(tensors_in(result))
        if not tensors:
            raise TypeError(
                f"warmup_compiled: expected the callable of task '{self._name}' "
                "to return a tensor or a structure with tensors, got "
                f"{type(result).__name__}. Return the loss or the model's outputs."
            )
        return tensors

    def modules(self) -> list[torch.nn.Module]:
        """Every module that can be found from the callable, roots only."""
        found: dict[int, torch.nn.Module] = {}
        for reference in self._modules:
            module = reference()
            if module is not None:
                found[id(module)] = module
        try:
            fn = self._fn()
        except ReferenceError:
            return list(found.values())
        for module in modules_in(fn):
            found[id(module)] = module
        return list(found.values())

    def state(self) -> list[torch.Tensor]:
        """Parameters and buffers of `modules`, each once."""
        tensors: dict[int, torch.Tensor] = {}
        for root in self.modules():
            for module in root.modules():
                for tensor in (
                    *module._parameters.values(),
                    *module._buffers.values(),
                ):
                    # A lazy parameter gets its shape from the first run and
                    # must keep it.
                    if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
                        tensors[id(tensor)] = tensor
        return list(tensors.values())

    def warn_eager(self, task: str, reason: str) -> None:
        """Warn that a run was not compiled."""
        warnings.warn(
            f"warmup_compiled: task '{task}' ran eagerly, not compiled: {reason}",
            stacklevel=4,
        )

    def remember(self) -> Callable[[], None]:
        """Remember Python's and NumPy's random streams, buffers and DDP flags."""
        buffers = [
            (module, dict(module._buffers))
            for root in self.modules()
            for module in root.modules()
        ]
        # Ranks warm at different times: a collective in a DDP forward would
        # wait, and pair with another rank's next one.
        as_before = contextlib.ExitStack()
        as_before.enter_context(unchanged_random_streams())
        as_before.enter_context(collective_free(self.modules()))

        def put_back() -> None:
            for module, before in buffers:
                for key, tensor in before.items():
                    if module._buffers.get(key) is not tensor:
                        module._buffers[key] = tensor
            as_before.close()

        return put_back


def structured(structure: Callable[[list[Any]], tuple[Any, dict[str, Any]]]) -> None:
    """Let the next `Callee.run` of this thread call with args and kwargs."""
    _call.structure = structure


def unstructured() -> None:
    """Forget what `structured` set, if no run has used it."""
    _call.__dict__.pop("structure", None)


def hold(value: Any) -> Callable[[], Any]:
    """Return a function that gives `value` back, holding its modules weakly.

    A function with a module in a cell or a default is made anew, of the same
    code, for each call. What other objects hold stays held by them. The
    returned function raises ReferenceError, naming the class, for a dead one.
    """
    held = _hold_weakly(value, frozenset())
    return held or _constant(value)


def _hold_weakly(value: Any, above: frozenset[int]) -> Callable[[], Any] | None:
    # None: there is no module in it, so the value itself can be held.
    if id(value) in above:
        return None
    above = above | {id(value)}
    if isinstance(value, torch.nn.Module):
        return _weak_module(value)
    if isinstance(value, types.MethodType):
        owner = _hold_weakly(value.__self__, above)
        function = value.__func__
        return owner and (lambda: types.MethodType(function, owner()))
    if isinstance(value, functools.partial):
        return _weak_partial(value, above)
    if isinstance(value, types.FunctionType):
        return _weak_function(value, above)
    return None


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _weak_module(module: torch.nn.Module) -> Callable[[], torch.nn.Module]:
    reference = weakref.ref(module)
    name = type(module).__name__

    def get() -> torch.nn.Module:
        module = reference()
        if module is None:
            raise ReferenceError(name)
        return module

    return get


def _weak_partial(
    value: functools.partial[Any], above: frozenset[int]
) -> Callable[[], Any] | None:
    parts = [value.func, *value.args, *value.keywords.values()]
    held = [_hold_weakly(part, above) for part in parts]
    if not any(held):
        return None
    gets = [h or _constant(part) for h, part in zip(held, parts, strict=True)]
    keys = list(value.keywords)
    positional = 1 + len(value.args)

    def get() -> Any:
        func, *arguments = [one() for one in gets]
        return functools.partial(
            func,
            *arguments[: positional - 1],
            **dict(zip(keys, arguments[positional - 1 :], strict=True)),
        )

    return get


def _weak_function(
    value: types.FunctionType, above: frozenset[int]
) -> Callable[[], Any] | None:
    cells = value.__closure__ or ()
    defaults = value.__defaults__ or ()
    keywords = value.__kwdefaults__ or {}
    in_cells = [
        _hold_weakly(cell.cell_contents, above) if _is_filled(cell) else None
        for cell in cells
    ]
    in_defaults = [_hold_weakly(one, above) for one in defaults]
    in_keywords = {key: _hold_weakly(one, above) for key, one in keywords.items()}
    if not any((*in_cells, *in_defaults, *in_keywords.values())):
        return None
    # Only a cell with a module is replaced: what the function writes to the
    # others (`nonlocal`) must be seen by its owner.
    places: list[Any] = [h or cell for h, cell in zip(in_cells, cells, strict=True)]
    get_defaults = [
        h or _constant(one) for h, one in zip(in_defaults, defaults, strict=True)
    ]
    get_keywords = {
        key: h or _constant(keywords[key]) for key, h in in_keywords.items()
    }
    code, scope, name = value.__code__, value.__globals__, value.__name__
    attributes = dict(value.__dict__)

    def get() -> Any:
        function = types.FunctionType(
            code,
            scope,
            name,
            tuple(one() for one in get_defaults),
            tuple(
                place if isinstance(place, types.CellType) else types.CellType(place())
                for place in places
            ),
        )
        function.__kwdefaults__ = {key: one() for key, one in get_keywords.items()}
        function.__dict__.update(attributes)
        return function

    return get


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def modules_in(value: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules that a callable reaches.

    Looks at itself, a bound self and its attributes, cells, defaults, globals
    that the code names, `functools.partial`, wrapped functions, and lists,
    tuples, sets and dicts of these.
    """
    seen: set[int] = set()
    open_values: list[tuple[Any, bool]] = [(value, True)]
    while open_values:
        one, deep = open_values.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.nn.Module):
            yield one
        elif isinstance(one, types.MethodType):
            open_values += [(one.__self__, True), (one.__func__, True)]
        elif isinstance(one, functools.partial):
            open_values += [
                (part, True) for part in (one.func, *one.args, *one.keywords.values())
            ]
        elif isinstance(one, types.FunctionType):
            open_values += [(part, True) for part in _named_by(one)]
        elif isinstance(one, dict | list | tuple | set) and len(one) <= _SMALL:
            parts = one.values() if isinstance(one, dict) else one
            open_values += [(part, False) for part in parts]
        elif (
            deep
            and isinstance(getattr(one, "__dict__", None), dict)
            and not isinstance(one, type | types.ModuleType)
        ):
            open_values += [(part, False) for part in vars(one).values()]


def compiled_in(fn: Any) -> Iterator[Any]:
    """Yield what `torch.compile` made and `fn` is known to reach."""
    if hasattr(fn, "_torchdynamo_orig_callable"):
        yield fn
    for root in modules_in(fn):
        for module in root.modules():
            if (
                isinstance(module, torch._dynamo.OptimizedModule)
                or module._compiled_call_impl is not None
            ):
                yield module


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        if _is_filled(cell):
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from function.__dict__.values()
    for name in _names(function.__code__):
        one = function.__globals__.get(name)
        if isinstance(
            one,
            torch.nn.Module
            | functools.partial
            | types.MethodType
            | list
            | tuple
            | dict,
        ):
            yield one


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a result: containers, dataclasses, plain objects."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))
        elif isinstance(leaf, Mapping):
            for part in leaf.values():
                yield from tensors_in(part)


def explain(task: str, error: BaseException) -> None:
    """Name the task in `error`, and drop what its frames hold.

    The type stays, and so does the traceback with the user's frames; the
    frames' local variables go, as these are the outputs and saved tensors of a
    run that nobody can continue.
    """
    note = f"(while warming task '{task}')"
    if not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        first = error.args[0] if error.args else None
        if isinstance(first, str) and str(error) == first:
            if note not in first:
                error.args = (f"{first} {note}", *error.args[1:])
        elif hasattr(error, "add_note"):
            error.add_note(note)
    seen: set[int] = set()
    open_errors: list[BaseException | None] = [error]
    while open_errors:
        one = open_errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        open_errors += [one.__cause__, one.__context__]
