# SPDX-License-Identifier: LGPL-3.0-or-later
"""Inductor's part: program order, and no release of what is still needed.

Two things that the ORDERED effect alone does not give:

- Torch 2.11 records the order of effectful calls under a name that its
  scheduler never looks up (pytorch#189209), so passes may reorder them. Here
  each call waits for the one before it, without keeping its inputs alive.
- A compiler takes tensors for immutable values. It moves readers, merges equal
  values, keeps some for the backward and reuses buffers. So a release is lowered
  as a write: after every reader that does not wait for it, its buffer not
  reused; and a tensor that is an output, or that a call after it still reads,
  goes in as a view, which the operator refuses.

Inductor takes seconds to import, so this registers when a compilation has
imported it: the fakes call `register`.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._library.effects import EffectType
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)

from deepmd_prewarm._operators import ACTING, RELEASING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_registered = False


def register() -> None:
    """Register the lowerings once Inductor is there; else do nothing."""
    global _registered
    module = sys.modules.get("torch._inductor.lowering")
    if _registered or not hasattr(module, "with_effects"):
        return
    for operator in ACTING:
        module.lowerings[operator] = _lowering(operator)  # type: ignore[union-attr]
    _registered = True


def _lowering(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph = V.graph
        released: list[Any] = []
        if operator in RELEASING:
            released, listed = _what_can_go(graph, args[0])
            args = (listed, *args[1:])
            for tensor in released:
                tensor.realize()
                graph.mark_buffer_mutated(tensor.get_name())
                graph.never_reuse_buffers.add(tensor.get_name())
        before = len(graph.operations)
        result = ir.FallbackKernel.create(operator, *args, **kwargs)
        call = graph.operations[before]
        if operator in RELEASING:
            call.python_kernel_name = _CALL_RELEASE[operator]
        for tensor in released:
            layout = ir.NoneLayout(device=tensor.get_device())
            call.mutation_outputs.append(ir.MutationOutput(layout, tensor, call))
        previous = graph.effectful_ops.get(EffectType.ORDERED)
        if previous is not None:
            for operation in graph.operations[before:]:
                graph.additional_buffer_deps[operation.get_operation_name()].add(
                    previous.get_name()
                )
        return result

    return lower


def run_release(
    operator: torch._ops.OpOverload, inputs: Sequence[torch.Tensor | None]
) -> int:
    """Run a release from generated code, past AOTAutograd's alias check.

    A compiled function makes its first run under a dispatch mode that checks
    custom operators. It reaches the kernel as a second call while the first one
    waits with its list, and whatever is on two lists is refused.
    """
    mode = _get_current_dispatch_mode()
    if type(mode).__name__ != "_AnalyzeCustomOpInputOutputMode":
        return int(operator(inputs))
    with _pop_mode_temporarily():
        return int(operator(inputs))


run_release_default = functools.partial(run_release, RELEASING[0])
run_release_list = functools.partial(run_release, RELEASING[1])
_CALL_RELEASE = {
    operator: f"__import__('{__name__}')._inductor.run_release_{overload}"
    for operator, overload in zip(RELEASING, ("default", "list"), strict=True)
}


def _what_can_go(graph: Any, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Lower the readers first; return what is free then, and the argument list."""
    from torch._inductor.lowering import lowerings

    node = graph.current_node
    sources = [source and _storage(source) for source in _released_nodes(node)]
    needed = _read_before(graph, node, {source for source in sources if source})
    released: list[Any] = []
    listed: list[Any] = []
    for tensor, source in zip(tensors, sources, strict=True):
        if tensor is not None and (not source or source in needed):
            tensor = lowerings[torch.ops.aten.unsqueeze.default](tensor, 0)
        elif tensor is not None:
            released.append(tensor)
        listed.append(tensor)
    return released, listed


def _read_before(graph: Any, node: torch.fx.Node, wanted: set[int]) -> set[int]:
    """Lower every reader of `wanted` that can run before `node` does.

    Returns the storages that are read after it all the same.
    """
    waiting = {node}
    movable: dict[torch.fx.Node, None] = {}
    needed: set[int] = set()
    ahead: list[torch.fx.Node] = []
    later = node.next
    while later.op != "root":
        inputs = set(later.all_input_nodes)
        reads = {_storage(read) for read in inputs} & wanted
        if later.op == "output" or inputs & waiting:
            waiting.add(later)
            needed |= reads
        else:
            movable[later] = None
            if reads:
                ahead.append(later)
        later = later.next
    # What a reader needs itself goes first, in the order of the graph.
    moved: set[torch.fx.Node] = set()
    while ahead:
        reader = ahead.pop()
        if reader in movable and reader not in moved:
            moved.add(reader)
            ahead.extend(reader.all_input_nodes)
    for reader in movable:
        if reader in moved and reader not in graph.env:
            graph.env[reader] = graph.run_node(reader)
    return needed


def _released_nodes(node: torch.fx.Node) -> Sequence[torch.fx.Node | None]:
    # Called as it is, or as with_effects(token, operator, inputs).
    position = 0 if node.target in RELEASING else 2
    return cast("Sequence[torch.fx.Node | None]", node.args[position])


def _storage(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return int(value.untyped_storage()._cdata)
    return 0
