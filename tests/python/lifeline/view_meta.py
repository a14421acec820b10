# SPDX-License-Identifier: LGPL-3.0-or-later
"""A crash in `apply_view_meta_sequence`, where deepmd-kit PR #5449 crashed, made small.

What was found: it is no matter of who keeps the traced graph. torch 2.11 writes the
`ViewMeta` of `_unsafe_view` and `resize_` (FunctionalizeFallbackKernel.h) through a
tuple whose element is `const std::vector<...>&`, bound to a temporary: `as_tuple()` and
pickle read freed memory. AOTAutogradCache pickles it for a graph that returns a matmul
of three dimensions and an alias of it, which is what taking the `detach` nodes out of a
graph makes of its saved tensors. Who loads that entry replays views of garbage sizes.
What is read depends on what the allocator wrote there (glibc: a mangled pointer and a
per-process random key), so whether a graph was freed before, or memory given back,
does change what happens; and one value in four has the bits of a heap-allocated SymInt
and is followed as a pointer: SIGSEGV, in the process that saves. pytorch issue #185630,
mended by #184774; torch 2.15 has that.

    python view_meta.py tuple    # sizes of one ViewMeta, after a pickle round trip
    python view_meta.py cache    # twice the same compile, the second from the cache
    python view_meta.py collect N [BACKEND [THRESHOLD]]  # N tasks, graphs dropped

`collect` is the theory of PR #5449 itself (symbolic integers of a dropped graph are
collected under the C++ view metadata): energy and force traced with symbolic sizes,
`detach` nodes taken out, outputs that alias, the traced graph dropped before and after
the first run, gc at every allocation while it runs, freed memory overwritten
(`MALLOC_PERTURB_`), recompiles for other shapes, second-order steps. It never failed.
View metadata with symbolic sizes holds counted references to them, and torch drops it
before a graph runs (schemas.py, `make_runtime_safe`).
"""

from __future__ import annotations

import gc
import pickle
import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def sizes_after_pickling() -> list[int]:
    """Give the sizes (2, 3, 4) to torch, and get them back from a pickle."""
    base = torch._to_functional_tensor(torch.ones(6, 4))
    torch._enable_functionalization(reapply_views=True)
    try:
        view = torch.ops.aten._unsafe_view(base, [2, 3, 4])
    finally:
        torch._disable_functionalization()
    (meta,) = torch._C._functionalization.get_view_meta_sequence(view)
    return list(pickle.loads(pickle.dumps(meta)).as_tuple()[1])


def compile_twice() -> None:
    """Compile, forget, and load the same from the compile cache."""

    def product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return y, y.view(-1)

    for _ in range(2):
        torch._dynamo.reset()
        x, w = torch.ones(2, 3, 4), torch.ones(4, 5, requires_grad=True)
        made = torch.compile(product, dynamic=False)(x, w)
        torch.testing.assert_close(made, product(x, w))
        made[0].sum().backward()  # an entry is saved once the backward is compiled


class Task:
    """Energy and force of a small network, compiled as deepmd-kit does."""

    def __init__(self, width: int, backend: str) -> None:
        torch.manual_seed(width)
        self.weights = [
            torch.randn(3, width).requires_grad_(),
            torch.randn(width, width).requires_grad_(),
        ]
        x = torch.randn(2, 5, 3)
        self.traced = make_fx(self.eager, tracing_mode="symbolic")(x, *self.weights)
        for node in self.traced.graph.find_nodes(
            op="call_function", target=torch.ops.aten.detach.default
        ):
            node.replace_all_uses_with(node.args[0])
            self.traced.graph.erase_node(node)
        self.traced.recompile()
        self.compiled = torch.compile(self.traced, backend=backend, dynamic=True)

    @staticmethod
    def eager(
        x: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return energy, force, and two tensors that share memory."""
        x = x.detach().requires_grad_()
        hidden = torch.tanh(x @ first) @ second
        energy = hidden.square().sum((1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -slope, hidden, hidden.view(-1), slope.transpose(0, 1)

    def step(self, frames: int) -> None:
        """Compare gradients of a loss on the force with eager ones."""
        x = torch.randn(frames, 5, 3)
        grads = []
        for call in (self.compiled, self.eager):
            energy, force, hidden, flat, _ = call(x, *self.weights)
            loss = energy.sum() + force.square().sum() + (hidden.view(-1) * flat).sum()
            grads.append(torch.autograd.grad(loss, self.weights))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)


def collect(count: int, backend: str = "aot_eager", threshold: int = 700) -> None:
    """Drop every traced graph under gc pressure, and train on.

    With a `threshold` of 1 while compiling, a task takes minutes.
    """
    gc.set_threshold(threshold)
    tasks = []
    for number in range(count):
        task = Task(4 + number, backend)
        if number % 2:
            task.step(3)
        del task.traced  # what PR #5449 did, before or after the first run
        gc.collect()
        task.step(3)
        tasks.append(task)
        gc.set_threshold(1)
        for frames in (4, 5, 3):
            task.step(frames)
        gc.set_threshold(threshold)
    for task in tasks[1:]:
        task.step(1)  # another graph
        task.step(3)


if __name__ == "__main__":
    if sys.argv[1] == "tuple":
        print(sizes_after_pickling())
    elif sys.argv[1] == "cache":
        compile_twice()
    else:
        collect(int(sys.argv[2]), *sys.argv[3:4], *map(int, sys.argv[4:]))
    print("done")
