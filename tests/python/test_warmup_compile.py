# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a warm-up leaves for the first training step to compile: nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from deepmd_prewarm import CompiledTask, warmup_compiled
from fresh_process import in_fresh_process
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx


class Counter:
    """An AOTAutograd backend that counts forward and backward compiles."""

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0
        self.backend = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            inference_compiler=self._forward,
        )

    def _forward(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.forward += 1
        return graph.forward

    def _backward(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.backward += 1
        return graph.forward

    def read(self) -> tuple[int, int]:
        return self.forward, self.backward


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()


def sample(rows: int = 5) -> torch.Tensor:
    return torch.arange(rows * 3.0).reshape(rows, 3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_first_training_step_after_a_warm_up_compiles_nothing(
    dynamic: bool,
) -> None:
    net, counter = Net(), Counter()
    compiled = torch.compile(net, backend=counter.backend, dynamic=dynamic)
    warmup_compiled(CompiledTask.from_callable("t", compiled), [sample()])
    assert counter.read() == (1, 1)
    compiled(sample()).sum().backward()
    assert counter.read() == (1, 1)
    assert net.linear.weight.grad is not None


def test_a_forward_only_warm_up_leaves_the_backward_to_training_and_says_so() -> None:
    net, counter = Net(), Counter()
    compiled = torch.compile(net, backend=counter.backend, dynamic=False)
    task = CompiledTask.from_callable("t", compiled)
    warmup_compiled(task, [sample()], backward=False)
    compiled(sample()).sum().backward()
    assert counter.backward >= 1
    assert task.stats()["covers_training"] == 0


def test_an_eval_handle_is_warmed_for_validation_without_grad() -> None:
    net, counter = Net().eval(), Counter()
    compiled = torch.compile(net, backend=counter.backend)
    task = CompiledTask.from_callable("t", compiled)
    with torch.no_grad():
        warmup_compiled(task, [sample()], backward=False)
        assert counter.read() == (1, 0)
        compiled(sample())
    assert counter.read() == (1, 0)
    # Another grad mode is another graph (case B4).
    compiled(sample()).sum().backward()
    assert counter.read() == (2, 1)


def test_an_inference_mode_warm_up_leaks_no_inference_tensor_into_training() -> None:
    net = Net()
    compiled = torch.compile(net, backend=Counter().backend)
    task = CompiledTask.from_callable("t", compiled)
    with torch.inference_mode():
        warmup_compiled(task, [torch.ones(5, 3)])
    assert task.stats()["covers_training"] == 0
    assert not any(t.is_inference() for t in (*net.parameters(), *net.buffers()))
    compiled(sample()).sum().backward()


def test_transposed_and_leaf_samples_warm_the_graph_that_training_uses() -> None:
    counter = Counter()
    compiled = torch.compile(lambda x: (x * x).sum(), backend=counter.backend)
    x = torch.rand(4, 3).t().requires_grad_()
    warmup_compiled(CompiledTask.from_callable("t", compiled), [x])
    assert counter.read() == (1, 1)
    compiled(x).backward()
    assert counter.read() == (1, 1)
    assert torch.equal(x.grad, 2 * x.detach())


def test_a_closure_around_the_compiled_module_warms_it() -> None:
    net, counter = Net(), Counter()
    compiled = torch.compile(net, backend=counter.backend)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return compiled(batch["x"]).square().mean()

    warmup_compiled(CompiledTask.from_callable("t", step), [{"x": sample()}])
    step({"x": sample()}).backward()
    compiled(sample()).sum().backward()
    assert counter.read() == (1, 1)


class OneClass(torch.nn.Module):
    """Guards on a string, so each instance needs a compile of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * len(self.name + "x")


@in_fresh_process
def test_a_handle_beyond_the_recompile_limit_is_reported_as_eager_not_warm() -> None:
    limit = torch._dynamo.config.recompile_limit
    assert limit == 8
    counter = Counter()
    nets = [OneClass("t" * i) for i in range(12)]
    compiled = [torch.compile(net, backend=counter.backend) for net in nets]
    tasks = [CompiledTask.from_callable(f"t{i}", c) for i, c in enumerate(compiled)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for task in tasks:
            warmup_compiled(task, [sample()])
    assert [task.is_warm() for task in tasks] == [i < limit for i in range(12)]
    assert [task.stats()["eager_runs"] for task in tasks] == [
        float(i >= limit) for i in range(12)
    ]
    texts = [str(w.message) for w in caught if "ran eagerly" in str(w.message)]
    assert len(texts) == 12 - limit
    assert f"task 't{limit}'" in texts[0]
    assert "recompile_limit" in texts[0]
    # The tasks that are warm stay so.
    compiled[0](sample()).sum().backward()
    assert counter.forward == limit


def test_twelve_graph_modules_are_all_warm() -> None:
    graphs = [make_fx(OneClass("t" * i))(sample()) for i in range(12)]
    counter = Counter()
    for i, graph in enumerate(graphs):
        task = CompiledTask.from_callable(
            f"t{i}", compiled := torch.compile(graph, backend=counter.backend)
        )
        warmup_compiled(task, [sample()])
        assert task.is_warm(), compiled
    assert counter.forward == 12


@in_fresh_process
def test_fullgraph_beyond_the_recompile_limit_stays_the_error_that_it_is() -> None:
    class Other(OneClass):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + len(self.name)

    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = [
            torch.compile(Other("t" * i), backend="eager", fullgraph=True)
            for i in range(2)
        ]
        warmup_compiled(CompiledTask.from_callable("a", compiled[0]), [sample()])
        task = CompiledTask.from_callable("b", compiled[1])
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            warmup_compiled(task, [sample()])
    assert not task.is_warm()


def broken(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    raise ZeroDivisionError("no code today")


def test_a_compiler_error_keeps_its_type_and_names_the_task() -> None:
    net = Net()
    compiled = torch.compile(net, backend=broken)
    task = CompiledTask.from_callable("water", compiled)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as e:
        warmup_compiled(task, [sample()])
    text = str(e.value) + "".join(getattr(e.value, "__notes__", []))
    assert "no code today" in text
    assert "water" in text
    assert isinstance(e.value.inner_exception, ZeroDivisionError)


@in_fresh_process
def test_a_compiler_error_that_suppress_errors_hides_is_not_called_warm() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        net = torch.compile(Net(), backend=broken)
        task = CompiledTask.from_callable("t", net)
        with pytest.warns(UserWarning, match=r"(?s)ran eagerly.*no code today"):
            warmup_compiled(task, [sample()])
        assert not task.is_warm()
        assert torch._dynamo.config.suppress_errors


def test_a_handle_whose_compiling_is_switched_off_is_not_called_warm() -> None:
    net = torch.compile(Net(), backend="eager")
    task = CompiledTask.from_callable("t", net)
    with torch.compiler.set_stance("force_eager"):
        with pytest.warns(UserWarning, match="switched off"):
            warmup_compiled(task, [sample()])
        assert not task.is_warm()
        eager = Net()
        plain = CompiledTask.from_callable("p", eager)
        warmup_compiled(plain, [sample()])
        assert plain.is_warm()  # never meant to be compiled


def energy_and_force(
    net: Any, coord: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    coord = coord.detach().requires_grad_()
    energy = net(coord).sum()
    (force,) = torch.autograd.grad(energy, coord, create_graph=True)
    return energy, -force


def test_a_force_loss_after_the_warm_up_has_the_gradients_of_eager() -> None:
    def mlp() -> torch.nn.Module:
        torch.manual_seed(7)
        return torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        )

    donated = torch._functorch.config.donated_buffer
    eager, net, counter = mlp(), mlp(), Counter()
    names = [name for name, _ in net.named_parameters()]

    def lower(coord: torch.Tensor, *weights: torch.Tensor) -> Any:
        call = torch.func.functional_call
        module = lambda x: call(net, dict(zip(names, weights, strict=True)), (x,))  # noqa: E731
        return energy_and_force(module, coord)

    graph = make_fx(lower)(sample(), *net.parameters())
    for node in graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.detach.default
    ):  # as deepmd-kit does: they would cut the force's own gradient
        node.replace_all_uses_with(node.args[0])
    graph.recompile()
    compiled = torch.compile(graph, backend=counter.backend, dynamic=False)

    def loss() -> torch.Tensor:
        energy, force = compiled(sample(), *net.parameters())
        return energy.square() + force.square().sum()

    task = CompiledTask.from_callable("t", loss, modules=[net])
    warmup_compiled(task)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch._functorch.config.donated_buffer is donated
    before = counter.read()
    for _ in range(2):
        loss().backward()
        energy, force = energy_and_force(eager, sample())
        (energy.square() + force.square().sum()).backward()
    assert counter.read() == before
    for mine, right in zip(net.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(mine.grad, right.grad, rtol=1e-4, atol=1e-5)


def test_a_warm_up_changes_no_key_and_no_value_of_a_checkpoint() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    before = {key: value.clone() for key, value in compiled.state_dict().items()}
    task = CompiledTask.from_callable("t", compiled)
    compiled.task = task
    warmup_compiled(task, [sample()])
    after = compiled.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert list(net.state_dict()) == list(Net().state_dict())
    Net().load_state_dict(net.state_dict())


@in_fresh_process
def test_donated_buffers_survive_a_warm_up_and_the_step_after_it() -> None:
    assert torch._functorch.config.donated_buffer
    net, counter = Net(), Counter()
    compiled = torch.compile(net, backend=counter.backend)
    # Behind the sample lies a graph of the caller, which must stay usable.
    weight = torch.ones(3, requires_grad=True)
    x = sample() * (weight * 2).exp()
    task = CompiledTask.from_callable("t", compiled)
    warmup_compiled(task, [x])
    assert task.stats()["covers_training"] == 1
    compiles = counter.read()
    compiled(x).sum().backward()
    assert counter.read() == compiles
    assert weight.grad is not None
    # A first backward that retained its graph would have left none to donate.
    with pytest.raises(RuntimeError, match="donated buffers"):
        compiled(sample() * (weight * 2).exp()).sum().backward(retain_graph=True)
    assert counter.read() == compiles
