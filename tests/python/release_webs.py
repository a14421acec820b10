# SPDX-License-Identifier: LGPL-3.0-or-later
"""Random webs of tensors against a plain model of who can read what.

Run as a program (``release_webs.py NUMBER [SEED]``), so that a crash is an exit
code. A web is built step by step: tensors, views, aliases, graphs that saved
them, borrowers; in between, lists of them are released. The model knows nothing
of reference counts: a storage goes if nobody but the list can read it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import deepmd_prewarm
import numpy as np
import torch
from deepmd_prewarm import explain_release, release_trace_inputs
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

deepmd_prewarm.load()


@dataclass(eq=False)
class Memory:
    """A storage: who borrowed it, and whether it was released."""

    nbytes: int
    borrowed: bool = False
    borrowers: list[Any] = field(default_factory=list)
    released: bool = False


@dataclass(eq=False)
class Node:
    """A tensor object, which a view may keep alive without a name."""

    memory: Memory
    values: np.ndarray
    base: Node | None = None
    is_leaf_with_gradient: bool = False
    leaves: frozenset[Node] = frozenset()  # whose gradients its graph adds to
    graph_saved_itself: bool = False


@dataclass(eq=False)
class Graph:
    """A loss whose backward reads `saved` and adds to `leaves`."""

    saved: Node
    loss: torch.Tensor
    weight: torch.Tensor
    leaves: frozenset[Node]


class Web:
    """What a Python program holds, and the model's view of it."""

    def __init__(self) -> None:
        self.names: dict[Node, torch.Tensor] = {}
        self.aliases: dict[Node, torch.Tensor] = {}
        self.graphs: list[Graph] = []

    # -- building ---------------------------------------------------------------

    def readable(self) -> list[Node]:
        return [node for node in self.names if not node.memory.released]

    def put(self, tensor: torch.Tensor, **facts: Any) -> None:
        node = Node(values=tensor.detach().clone().numpy(), **facts)
        if node.is_leaf_with_gradient:
            node.leaves = frozenset([node])
        self.names[node] = tensor

    def make(self, size: int, kind: str) -> None:
        memory = Memory(8 * size, borrowed=kind in ("numpy", "shared", "buffer"))
        if kind == "numpy":
            tensor = torch.from_numpy(np.random.rand(size))
        elif kind == "buffer":
            tensor = torch.frombuffer(bytearray(8 * size), dtype=torch.float64)
        else:
            tensor = torch.rand(size, dtype=torch.float64)
            if kind == "shared":
                tensor.share_memory_()
            elif kind == "leaf":
                tensor.requires_grad_()
        self.put(tensor, memory=memory, is_leaf_with_gradient=kind == "leaf")

    def make_view_of_nameless(self, size: int) -> None:
        tensor = torch.rand(size, dtype=torch.float64)[1:]
        memory = Memory(8 * size)
        base = Node(memory, values=np.empty(0))
        self.put(tensor, memory=memory, base=base)

    def view(self, node: Node, kind: str) -> None:
        tensor = self.names[node]
        made = {
            "slice": lambda: tensor[..., :1],
            "expand": lambda: tensor.expand(2, *tensor.shape),
            "unsqueeze": lambda: tensor[None],
            "as_strided": lambda: tensor.as_strided((2, 1), (0, 1)),
            "transpose": lambda: tensor.T if tensor.dim() == 2 else tensor[None].T,
            "detach": tensor.detach,
            "data": lambda: tensor.data,
        }[kind]()
        if kind in ("detach", "data"):
            self.put(made, memory=node.memory)
        else:
            base = node.base or node
            self.put(made, memory=node.memory, base=base, leaves=node.leaves)

    def result(self, node: Node, kind: str) -> None:
        tensor = self.names[node]
        made = tensor.exp() if kind == "exp" else tensor + 1
        self.put(
            made,
            memory=Memory(made.untyped_storage().nbytes()),
            leaves=node.leaves,
            graph_saved_itself=kind == "exp" and bool(node.leaves),
        )

    def graph(self, node: Node) -> None:
        tensor = self.names[node]
        weight = torch.ones_like(tensor, requires_grad=True)
        loss = (tensor * weight).sum()
        self.graphs.append(Graph(node, loss, weight, node.leaves))

    def borrow(self, node: Node, kind: str) -> None:
        tensor = self.names[node].detach()
        if kind == "numpy":
            node.memory.borrowed = True  # torch marks the storage for good
            tensor.numpy()
        elif kind == "storage":
            node.memory.borrowers.append(tensor.untyped_storage())
        else:
            capsule = torch.utils.dlpack.to_dlpack(tensor)
            if kind == "consumed":
                capsule = torch.utils.dlpack.from_dlpack(capsule)
            node.memory.borrowers.append(capsule)

    # -- the model --------------------------------------------------------------

    def alive(self, given_up: set[Node]) -> set[Node]:
        """Nodes that still exist, the given ones included."""
        found = set(self.names) | given_up | {graph.saved for graph in self.graphs}
        return found | {node.base for node in found if node.base}

    def expect_released(self, given: list[Node], by_names: bool) -> set[Memory]:
        given_up = set(given)
        alive = self.alive(given_up)
        readers = {node for node in self.names if node not in given_up}
        readers |= {graph.saved for graph in self.graphs}
        readers |= {node for node in alive if node.graph_saved_itself}
        if by_names:
            readers |= set(self.aliases) & given_up
        dependents = [(node, node.leaves) for node in alive]
        dependents += [(graph, graph.leaves) for graph in self.graphs]
        readers |= {
            leaf
            for leaf in alive
            if leaf.is_leaf_with_gradient
            and any(leaf in leaves for other, leaves in dependents if other is not leaf)
        }
        read = {node.memory for node in readers}
        return {
            node.memory
            for node in given
            if not (
                node.memory in read
                or node.memory.released
                or node.memory.borrowed
                or node.memory.borrowers
            )
        }

    # -- acting and checking ----------------------------------------------------

    def release(self, given: list[Node | None], route: str) -> None:
        nodes = [node for node in given if node is not None]
        expected = self.expect_released(nodes, by_names=route == "names")
        reasons, freed = self.call(given, route)
        assert freed == sum(memory.nbytes for memory in expected), (freed, reasons)
        for node, reason in zip(given, reasons, strict=True):
            will_go = node is not None and node.memory in expected
            assert (reason == "release") == will_go, (reason, node)
        for memory in expected:
            memory.released = True
        self.check()

    def call(self, given: list[Node | None], route: str) -> tuple[list[str], int]:
        if route == "bare":
            inputs = [None if node is None else self.names[node] for node in given]
            reasons = torch.ops.deepmd.explain_release(inputs)
            return reasons, torch.ops.deepmd.release_trace_inputs(inputs)
        # The names of the code below are those of a caller's frame.
        order = list(dict.fromkeys(node for node in given if node is not None))
        scope: dict[str, Any] = {
            "explain": explain_release,
            "release": release_trace_inputs,
        }
        for i, node in enumerate(order):
            scope[f"t{i}"] = self.names.pop(node)
        source = ", ".join(
            "None" if node is None else f"t{order.index(node)}" for node in given
        )
        exec(f"reasons = explain([{source}])\nfreed = release([{source}])", scope)
        for i, node in enumerate(order):
            self.names[node] = scope[f"t{i}"]
        return scope["reasons"], scope["freed"]

    def check(self) -> None:
        for node, tensor in self.names.items():
            if node.memory.released:
                try:
                    tensor.sum()
                except RuntimeError as error:
                    assert str(error).startswith("release_trace_inputs"), error
                else:
                    raise AssertionError("a released tensor could be read")
            else:
                assert np.array_equal(tensor.detach().clone().numpy(), node.values)

    def check_graphs(self) -> None:
        for graph in self.graphs:
            (gradient,) = torch.autograd.grad(
                graph.loss, graph.weight, retain_graph=True
            )
            assert np.array_equal(gradient.numpy(), graph.saved.values)


STEPS = {
    "make": ["plain", "plain", "leaf", "numpy", "shared", "buffer"],
    "nameless": [None],
    "view": [
        "slice", "expand", "unsqueeze", "as_strided", "transpose", "detach", "data",
    ],
    "result": ["exp", "add"],
    "graph": [None],
    "borrow": ["numpy", "storage", "capsule", "consumed"],
    "alias": [None],
    "drop": ["name", "graph", "borrower", "alias"],
    "release": ["bare", "bare", "names"],
}  # fmt: skip


def take_step(web: Web, data: st.DataObject, step: str) -> None:
    kind = data.draw(st.sampled_from(STEPS[step]))
    if step in ("make", "nameless"):
        size = data.draw(st.integers(2, 5))
        web.make(size, kind) if step == "make" else web.make_view_of_nameless(size)
        return
    if step == "release":
        if not web.names:
            return
        choice = st.sampled_from([*web.names, None])
        given = data.draw(st.lists(choice, max_size=6))
        web.release(given, kind)
        return
    if step == "drop" and kind == "graph":
        if web.graphs:
            web.graphs.pop(data.draw(st.integers(0, len(web.graphs) - 1)))
        return
    nodes = web.readable()
    if not nodes:
        return
    node = data.draw(st.sampled_from(nodes))
    if step == "view":
        web.view(node, kind)
    elif step == "result":
        web.result(node, kind)
    elif step == "graph":
        web.graph(node)
    elif step == "borrow":
        web.borrow(node, kind)
    elif step == "alias":
        web.aliases[node] = web.names[node]
    elif kind == "name":
        del web.names[node]
        web.aliases.pop(node, None)
    elif kind == "borrower":
        node.memory.borrowers.clear()
    else:
        web.aliases.pop(node, None)


def a_web_behaves_like_its_model(data: st.DataObject) -> None:
    web = Web()
    steps = st.lists(st.sampled_from(list(STEPS)), min_size=3, max_size=20)
    for step in ["make", *data.draw(steps), "release"]:
        take_step(web, data, step)
    web.check()
    web.check_graphs()


def main(number: int, start: int) -> None:
    """Try `number` webs; raises with the smallest one that fails."""
    test = given(st.data())(a_web_behaves_like_its_model)
    seed(start)(
        settings(
            max_examples=number,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )(test)
    )()
    print(f"{number} webs")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
