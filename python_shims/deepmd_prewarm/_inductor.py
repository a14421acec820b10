# SPDX-License-Identifier: LGPL-3.0-or-later
"""Inductor's part: program order, and no release of what is still needed.

Two things that the ORDERED effect alone does not give:

- Torch 2.11 records the order of effectful calls under a name that its
  scheduler never looks up (pytorch#189209), so passes may reorder them. Here
  each call waits for the one before it, without keeping its inputs alive.
- A compiler takes tensors for immutable values. It merges equal ones, keeps
  some for the backward and reuses buffers. So a release is lowered as a write:
  after every reader before it, its buffer not reused; and a tensor that
  something after it still reads goes in as a view, which the operator refuses.

Inductor takes seconds to import, so this registers when a compilation has
imported it: the fakes call `register`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._library.effects import EffectType

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
            released, listed = _last_reads(graph.current_node, args[0])
            args = (listed, *args[1:])
            for tensor in released:
                tensor.realize()
                graph.mark_buffer_mutated(tensor.get_name())
                graph.never_reuse_buffers.add(tensor.get_name())
        before = len(graph.operations)
        result = ir.FallbackKernel.create(operator, *args, **kwargs)
        call = graph.operations[before]
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


def _last_reads(
    node: torch.fx.Node, tensors: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Split a release into tensors it reads last, and its whole argument list."""
    from torch._inductor.lowering import lowerings

    nodes = _released_nodes(node)
    later = _storages_read_after(node)
    released: list[Any] = []
    listed: list[Any] = []
    for tensor, source in zip(tensors, nodes, strict=True):
        if tensor is None or source is None:
            listed.append(None)
        elif _storage(source) in later:
            listed.append(lowerings[torch.ops.aten.unsqueeze.default](tensor, 0))
        else:
            released.append(tensor)
            listed.append(tensor)
    return released, listed


def _released_nodes(node: torch.fx.Node) -> Sequence[torch.fx.Node | None]:
    # Called as it is, or as with_effects(token, operator, inputs).
    position = 0 if node.target in RELEASING else 2
    return cast("Sequence[torch.fx.Node | None]", node.args[position])


def _storages_read_after(node: torch.fx.Node) -> set[int]:
    found: set[int] = set()
    after = node.next
    while after.op != "root":
        found.update(_storage(read) for read in after.all_input_nodes)
        after = after.next
    return found - {0}


def _storage(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return int(value.untyped_storage()._cdata)
    return 0
