# SPDX-License-Identifier: LGPL-3.0-or-later
"""What compiling a task leaves behind is freed, and nothing that is still needed."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch
from deepmd_prewarm import compile_leftovers
from deepmd_prewarm.compile_counters import CompileMeter
from deepmd_prewarm.compile_leftovers import Leftovers
from deepmd_prewarm.prewarm import PrewarmTask
from deepmd_prewarm.prewarm import prewarm as real_prewarm
from fresh_process import in_fresh_process
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prewarm(tasks, **options):
    return real_prewarm(tasks, **{"progress": False, **options})


class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.inner = torch.nn.Linear(3, width)
        self.outer = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x))).sum()


class Potential(torch.nn.Module):
    """Energy and force through a graph that make_fx traced, as deepmd-kit does."""

    def __init__(self, width: int, backend: str = "aot_eager") -> None:
        super().__init__()
        self.net, self.backend = Net(width), backend
        self.traced = self.lower = None

    def eager(self, x: torch.Tensor, *weights: torch.Tensor):
        names = [name for name, _ in self.net.named_parameters()]
        x = x.detach().requires_grad_()
        given = dict(zip(names, weights, strict=True))
        energy = torch.func.functional_call(self.net, given, (x,))
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = list(self.net.parameters())
        if self.lower is None:
            traced = make_fx(self.eager, tracing_mode="symbolic")(x, *weights)
            # They cut the second derivative of saved outputs.
            for node in traced.graph.find_nodes(
                op="call_function", target=torch.ops.aten.detach.default
            ):
                node.replace_all_uses_with(node.args[0])
                traced.graph.erase_node(node)
            traced.recompile()
            lower = torch.compile(traced, backend=self.backend, dynamic=True)
            object.__setattr__(self, "traced", traced)
            object.__setattr__(self, "lower", lower)
        energy, slope = self.lower(x, *weights)
        return energy + slope.square().sum()


def fakes() -> int:
    gc.collect()
    return sum(issubclass(type(one), FakeTensor) for one in gc.get_objects())


@in_fresh_process
def test_twelve_tasks_leave_no_more_fake_tensors_than_three() -> None:
    after_each: list[int] = []
    for i in range(12):
        model = Potential(8 + i)
        prewarm([PrewarmTask("task", model, [torch.randn(5, 3)])])
        after_each.append(fakes())
        globals().setdefault("kept", []).append(model)
    per_task = (after_each[-1] - after_each[2]) / 9
    assert per_task <= 10, after_each


@in_fresh_process
def test_without_it_every_task_would_keep_its_fake_tensors() -> None:
    import os

    os.environ["DP_PREWARM_LEFTOVERS"] = "0"  # the control
    models = [Potential(8 + i) for i in range(3)]
    after_each = []
    for model in models:
        prewarm([PrewarmTask("task", model, [torch.randn(5, 3)])])
        after_each.append(fakes())
    assert after_each[2] - after_each[1] > 50, after_each


def warmed(count: int = 3) -> list[Potential]:
    models = [Potential(8 + i) for i in range(count)]
    prewarm(
        [
            PrewarmTask(f"t{i}", model, [torch.randn(5, 3)])
            for i, model in enumerate(models)
        ]
    )
    return models


def expect_eager(model: Potential, x: torch.Tensor) -> None:
    weights = list(model.net.parameters())
    ours = torch.autograd.grad(model(x), weights, allow_unused=True)
    energy, slope = model.eager(x, *weights)
    theirs = torch.autograd.grad(
        energy + slope.square().sum(), weights, allow_unused=True
    )
    for one, other in zip(ours, theirs, strict=True):
        if other is None:
            assert one is None or not one.any()
        else:
            torch.testing.assert_close(one, other)


def test_tasks_run_on_without_recompiling() -> None:
    models = warmed()
    meter = CompileMeter().start()
    for model in models:
        expect_eager(model, torch.randn(5, 3))
    assert meter.stop().total == 0


def test_dropped_tasks_die_and_the_others_run_on_without_recompiling() -> None:
    models = warmed(6)
    dropped = [weakref.ref(model.net.inner.weight) for model in models[:3]]
    dropped += [weakref.ref(model.traced) for model in models[:3]]
    dropped += [weakref.ref(model.traced.graph) for model in models[:3]]
    assert all(ref() is not None for ref in dropped)
    del models[:3]
    gc.collect()
    assert [ref() for ref in dropped if ref() is not None] == []
    meter = CompileMeter().start()
    for model in models:
        expect_eager(model, torch.randn(5, 3))
    assert meter.stop().total == 0


def test_another_shape_compiles_anew_and_is_right() -> None:
    (model,) = warmed(1)
    meter = CompileMeter().start()
    expect_eager(model, torch.randn(1, 3))
    assert meter.stop().total > 0


def test_a_graph_can_be_copied_saved_and_run_afterwards() -> None:
    (model,) = warmed(1)
    x, weights = torch.randn(5, 3), list(model.net.parameters())
    twin = copy.deepcopy(model.traced)
    torch.testing.assert_close(
        twin(x, *weights)[1], model.eager(x, *weights)[1], rtol=0, atol=1e-6
    )
    assert list(model.state_dict()) == list(Potential(8).state_dict())


def test_a_checkpointed_second_order_step_still_works() -> None:
    (model,) = warmed(1)
    x = torch.randn(5, 3)
    loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    loss.backward()
    ours = model.net.inner.weight.grad.clone()
    model.net.zero_grad()
    energy, slope = model.eager(x, *model.net.parameters())
    (energy + slope.square().sum()).backward()
    torch.testing.assert_close(ours, model.net.inner.weight.grad)


def test_a_backward_that_is_still_to_be_compiled_keeps_its_graph() -> None:
    """Only one of two compiled regions is run backward by the warm-up."""
    seen: list[int] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        return make_boxed_func(graph.forward)

    def compile_backward(graph: torch.fx.GraphModule, _: object) -> object:
        # Inductor takes sizes and strides from here.
        seen.append(values(graph.graph))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=compile_backward)
    first = torch.compile(Net(4), backend=backend)
    second = torch.compile(Net(5), backend=backend)
    later = []

    def step(x: torch.Tensor) -> torch.Tensor:
        later.append(second(x))  # logged here, trained on later
        return first(x)

    prewarm({"t": (step, [(torch.ones(5, 3),)])})
    later.clear()
    assert len(seen) == 1
    loss = second(torch.ones(5, 3))
    loss.backward()
    assert seen[0] == seen[1] > 0
    twin = Net(5)
    twin(torch.ones(5, 3)).backward()
    torch.testing.assert_close(
        second._orig_mod.inner.weight.grad, twin.inner.weight.grad
    )


def values(graph: torch.fx.Graph) -> int:
    return sum("val" in node.meta for node in graph.nodes)


def test_graphs_of_the_caller_keep_their_metadata() -> None:
    own = make_fx(torch.sin, tracing_mode="fake")(torch.ones(3))
    assert values(own.graph) > 0
    before = values(own.graph)
    exported = []

    def step(x: torch.Tensor) -> torch.Tensor:
        exported.append(torch.export.export(Net(4), (x.detach(),)))
        return Net(4)(x)

    prewarm({"t": (step, [(torch.ones(5, 3),)])})
    assert values(own.graph) == before
    program = exported[0]
    assert values(program.graph) > 0
    torch.testing.assert_close(
        program.run_decompositions().module()(torch.ones(5, 3)),
        Net(4)(torch.ones(5, 3)),
    )


def test_symbolic_sizes_outlive_the_metadata_that_had_them() -> None:
    leftovers = Leftovers()
    traced = make_fx(torch.sin, tracing_mode="symbolic")(torch.ones(3, 2))
    symbols = [
        str(node.meta["val"].shape[0]) for node in traced.graph.nodes if node.meta
    ]
    assert leftovers.release() > 0
    assert values(traced.graph) == 0
    del leftovers  # prewarming is over, the graph lives on
    kept = {str(one) for one in compile_leftovers._symbols_of[traced.graph]}
    assert kept.issuperset(symbols)
    graph = weakref.ref(traced.graph)
    del traced
    gc.collect()
    assert graph() is None  # they do not keep it


def test_a_name_that_torch_lacks_is_told_and_the_rest_is_freed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone() -> None:
        raise AttributeError

    names = dict(compile_leftovers._NAMES)
    names["FakeTensorMode.cache_clear"] = gone
    monkeypatch.setattr(compile_leftovers, "_NAMES", names)
    compile_leftovers._find.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            leftovers = Leftovers()
            traced = make_fx(torch.sin, tracing_mode="symbolic")(torch.ones(3, 2))
            assert leftovers.release() > 0
            leftovers.release()
        assert values(traced.graph) == 0
        assert compile_leftovers.missing() == ["FakeTensorMode.cache_clear"]
    finally:
        compile_leftovers._find.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert len([one for one in said if "FakeTensorMode.cache_clear" in one]) == 1


def test_this_torch_has_every_name() -> None:
    assert compile_leftovers.missing() == []


def test_a_fault_in_it_is_a_warning_and_the_task_is_warm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Leftovers) -> int:
        raise KeyError("val")

    monkeypatch.setattr(Leftovers, "release", broken)
    with caplog.at_level(logging.WARNING):
        report = prewarm(
            {"t": (torch.compile(Net(4), backend="eager"), [(torch.ones(5, 3),)])}
        )
    assert not report.ranks[0].tasks[0].eager
    assert any(
        "'t'" in r.getMessage() and "KeyError" in r.getMessage() for r in caplog.records
    )
