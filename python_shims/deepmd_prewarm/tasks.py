# SPDX-License-Identifier: LGPL-3.0-or-later
"""Handles on compiled callables, and the warm-up of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from . import _callee
from ._library import bridge

if TYPE_CHECKING:

    class _Handle:
        """What the library's class ``torch.classes.deepmd.CompiledTask`` offers."""

        def __init__(self, made: object) -> None: ...
        def name(self) -> str: ...
        def backend(self) -> str: ...
        def is_warm(self) -> bool: ...
        def stats(self) -> dict[str, float]: ...
        def close(self) -> None: ...

else:
    _Handle = bridge().Handle

__all__ = ["CompiledTask", "keep_alive", "trace_inputs", "warmup_compiled"]


class CompiledTask(_Handle):
    """A handle on one compiled callable, as operators and TorchScript name it.

    Make one with `from_callable`, `from_script` or `from_package`. Modules are
    held weakly: whoever trains keeps them. Python can neither copy nor pickle a
    handle, as compiled code belongs to its process; inside a TorchScript module
    one made by `from_script` is saved and loaded with its module.

    Methods of the library's class: ``name()``, ``backend()``, ``is_warm()``,
    ``stats()`` (runs, failures, eager_runs, forward_s and backward_s in
    seconds, covers_training 0 or 1) and ``close()``.
    """

    @classmethod
    def from_callable(
        cls,
        name: str,
        fn: Callable[..., Any],
        modules: Iterable[torch.nn.Module] = (),
    ) -> CompiledTask:
        """Make a handle on a Python callable.

        Parameters
        ----------
        name
            The task's name, as reports and errors show it.
        fn
            What training will call: a module (plain, DDP, compiled), a compiled
            function, a closure that returns the loss. Modules that it is, is
            bound to, closes over or has as `functools.partial` arguments are
            held weakly.
        modules
            Further modules whose parameters, buffers and ``.grad`` a run may
            change and a warm-up must put back; held weakly.

        Raises
        ------
        ValueError
            If `name` is empty.
        TypeError
            If `fn` is not callable or a module is none.
        """
        if not callable(fn):
            raise TypeError(
                "CompiledTask.from_callable: expected a callable, got "
                f"{type(fn).__name__}. Pass what training will call."
            )
        modules = list(modules)
        for module in modules:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(
                    "CompiledTask.from_callable: expected modules to be "
                    f"torch.nn.Module, got {type(module).__name__}"
                )
        if isinstance(fn, torch.jit.ScriptModule):
            return cls.from_script(name, fn)
        return cls(bridge().python_task(name, _callee.Callee(name, fn, modules)))

    @classmethod
    def from_script(
        cls, name: str, module: torch.jit.ScriptModule, method: str = "forward"
    ) -> CompiledTask:
        """Make a handle on a method of a TorchScript module, held weakly.

        Saved as an attribute of a TorchScript trainer it takes its module along
        and shares it after loading. Pass such attributes to `torch.jit.freeze`
        in ``preserved_attrs``: torch saves no code for what became a constant.

        Raises
        ------
        ValueError
            If `name` is empty or there is no such method.
        TypeError
            If `module` is not a TorchScript module.
        """
        return cls(bridge().script_task(name, module, method))

    @classmethod
    def from_package(cls, name: str, path: str | os.PathLike[str]) -> CompiledTask:
        """Make a handle on an AOTInductor package; its warm-up is inference.

        Parameters
        ----------
        name
            The task's name.
        path
            The ``.pt2`` file that ``aoti_compile_and_package`` made.

        Raises
        ------
        ValueError
            If `name` is empty, or the file is missing, damaged or made for
            another torch or device.
        """
        return cls(bridge().package_task(name, os.fspath(path)))

    def __repr__(self) -> str:
        return f"CompiledTask({self.name()!r}, backend={self.backend()!r})"

    __str__ = __repr__

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _refuse_to_load, (self.name(), self.backend())

    def __copy__(self) -> NoReturn:
        _refuse_to_load(self.name(), self.backend())

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse_to_load(self.name(), self.backend())


def _refuse_to_load(name: str, backend: str) -> NoReturn:
    # The library's text for a token, so that every route says the same.
    raise RuntimeError(
        "CompiledTask: expected a handle that can be copied or loaded, got task "
        f"'{name}' with a {backend} callable. Compiled handles are process-local: "
        "make a new one here with CompiledTask.from_callable."
    )


def warmup_compiled(
    task: CompiledTask | torch.ScriptObject,
    inputs: Sequence[Any] | Mapping[str, Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = True,
) -> None:
    """Run a task's callable once on sample inputs, and leave no trace of it.

    Forward and, if `backward` and an output requires grad, backward from the
    sum of the floating outputs, in the grad, inference and autocast mode of the
    caller. The outputs are dropped, the devices synchronized. Values and
    ``.grad`` of parameters and buffers, Python's, NumPy's and torch's random
    streams, the autograd graph and all modes are as before, also when it
    raises. No DDP and no post-accumulate hook fires; a hook set with
    ``Parameter.register_hook`` does.

    Parameters
    ----------
    task
        A handle. One that `is_warm()` afterwards ran compiled code, as far as
        can be told; a run without grad mode is not counted as covering
        training (``stats()["covers_training"]``).
    inputs
        Positional arguments, or keyword arguments if a mapping. Tensors are
        handed on as they are (strides, ``requires_grad``, dtype). A handle on
        a Python callable takes anything, the others tensors and None.
    kwargs
        Further keyword arguments, for a handle on a Python callable.
    backward
        Whether to run a backward.

    Raises
    ------
    TypeError
        If `task` is no handle, the arguments do not fit its kind, or the
        callable returns no tensor.
    RuntimeError
        If the handle was closed, or its module deleted.
    Exception
        Whatever the callable raises, with the task's name added.

    Notes
    -----
    Blocks while the callable compiles; one warm-up at a time in a process.
    Not collective.

    Backward graphs are compiled for one backward each, with donated buffers. A
    training that calls ``backward(retain_graph=True)`` through compiled code
    sets ``torch._functorch.config.donated_buffer = False`` before.
    """
    if not isinstance(task, torch.ScriptObject):
        raise TypeError(
            f"warmup_compiled: expected a CompiledTask, got {type(task).__name__}. "
            "Make one with CompiledTask.from_callable."
        )
    if isinstance(inputs, torch.Tensor):
        raise TypeError(
            "warmup_compiled: expected a sequence of arguments or a mapping, got a "
            "Tensor. Write [tensor]."
        )
    args: tuple[Any, ...]
    if isinstance(inputs, Mapping):
        args, kwargs = (), {**inputs, **(kwargs or {})}
    else:
        args, kwargs = tuple(inputs), dict(kwargs or {})
    plain = not kwargs and all(
        one is None or isinstance(one, torch.Tensor) for one in args
    )
    if plain:
        torch.ops.deepmd.warmup_compiled(task, list(args), backward=backward)
        return
    if task.backend() != "python":
        raise TypeError(
            f"warmup_compiled: expected tensors and None for task '{task.name()}', "
            f"whose callable is {task.backend()}, got other arguments. Pass tensors "
            "in the order of its arguments."
        )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    others = [None if t else leaf for t, leaf in zip(is_tensor, leaves, strict=True)]

    def structure(tensors: list[Any]) -> tuple[Any, dict[str, Any]]:
        given = iter(tensors)
        made: tuple[Any, dict[str, Any]] = pytree.tree_unflatten(
            [
                next(given) if t else other
                for t, other in zip(is_tensor, others, strict=True)
            ],
            spec,
        )
        return made

    tensors = [leaf for t, leaf in zip(is_tensor, leaves, strict=True) if t]
    _callee.structured(structure)
    try:
        torch.ops.deepmd.warmup_compiled(task, tensors, backward=backward)
    finally:
        _callee.unstructured()


@contextlib.contextmanager
def trace_inputs(**tensors: torch.Tensor | None) -> Iterator[dict[str, Any]]:
    """Give sample tensors to a trace, and their memory back afterwards.

    On exit, also by exception, releases what may be released of the given
    tensors (see `release_trace_inputs`); what something else still uses stays.

    Parameters
    ----------
    **tensors
        The trace-time inputs by name, e.g. ``ext_coord=..., nlist=...``.

    Yields
    ------
    dict
        The same tensors by name, emptied on exit.

    Examples
    --------
    >>> with trace_inputs(coord=torch.rand(8, 3)) as sample:  # doctest: +SKIP
    ...     graph = make_fx(fn)(sample["coord"])
    """
    from .ops import release_trace_inputs

    given = dict(tensors)
    tensors.clear()
    try:
        yield given
    finally:
        sample = list(given.values())
        given.clear()
        release_trace_inputs(sample)


def keep_alive(compiled: Any, traced_graph: Any) -> Any:
    """Make a traced graph live as long as the compiled callable made from it.

    The graph owns SymInts to which view metadata in C++ holds raw pointers
    (deepmd-kit's ``_remove_detach_nodes``), so it must not die first. It is
    stored as ``_traced_lower_ref`` with ``object.__setattr__``: no submodule, so
    ``train()`` does not walk into it and ``state_dict`` has no new key.

    Parameters
    ----------
    compiled
        A compiled module, or a raw compiled callable such as a function.
    traced_graph
        What must live as long, usually a ``torch.fx.GraphModule``.

    Returns
    -------
    Any
        `compiled` itself.

    Raises
    ------
    RuntimeError
        If `compiled` already has ``_traced_lower_ref``.
    TypeError
        If `compiled` takes no attributes (a bound method, a built-in).
    """
    if hasattr(compiled, "_traced_lower_ref"):
        raise RuntimeError(
            "keep_alive: expected a compiled callable without _traced_lower_ref, got "
            f"a {type(compiled).__name__} that has one. Call keep_alive once for "
            "each compiled callable."
        )
    try:
        object.__setattr__(compiled, "_traced_lower_ref", traced_graph)
    except (AttributeError, TypeError):
        raise TypeError(
            "keep_alive: expected a callable that takes attributes, got "
            f"{type(compiled).__name__}. Wrap it in a function or a module."
        ) from None
    return compiled
