# SPDX-License-Identifier: LGPL-3.0-or-later
"""warmup_compiled leaves no trace: streams, gradients, buffers, graphs, modes."""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from deepmd_prewarm import CompiledTask, warmup_compiled


class Net(torch.nn.Module):
    """Draws from torch, writes one buffer in place and rebinds another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.dropout(self.norm(self.linear(x)))


def sample(rows: int = 5) -> torch.Tensor:
    return torch.arange(rows * 3.0).reshape(rows, 3)


def state_of(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in net.state_dict().items()}


def same_state(net: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = net.state_dict()
    return now.keys() == before.keys() and all(
        torch.equal(now[key], value) for key, value in before.items()
    )


def test_random_streams_of_python_numpy_and_torch_are_as_before() -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(3) * random.random() * np.random.rand()

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    warmup_compiled(CompiledTask.from_callable("t", draws), [sample()])
    assert random.getstate() == before[0]
    assert all(
        np.array_equal(a, b)
        for a, b in zip(np.random.get_state(), before[1], strict=True)
    )
    assert torch.equal(torch.get_rng_state(), before[2])


def through_modules(net: Net) -> CompiledTask:
    box = [lambda x: net(x)]  # a closure inside a container is not searched
    call = functools.partial(lambda box, x: box[0](x), box)
    return CompiledTask.from_callable("t", call, modules=[net])


def through_bound_self(net: Net) -> CompiledTask:
    class Trainer:
        def __init__(self) -> None:
            self.models = {"a": net}

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.models["a"](x)

    return CompiledTask.from_callable("t", Trainer().step)


def through_closure(net: Net) -> CompiledTask:
    return CompiledTask.from_callable("t", lambda x: net(x).sum())


def through_partial(net: Net) -> CompiledTask:
    return CompiledTask.from_callable("t", functools.partial(lambda m, x: m(x), net))


def through_bound_method(net: Net) -> CompiledTask:
    return CompiledTask.from_callable("t", net.forward)


def through_global(net: Net) -> CompiledTask:
    scope = {"net": net}
    exec("def step(x): return [row for row in [net(x)]]", scope)
    return CompiledTask.from_callable("t", scope["step"])


def through_itself(net: Net) -> CompiledTask:
    return CompiledTask.from_callable("t", net)


def through_compiled_function(net: Net) -> CompiledTask:
    compiled = torch.compile(lambda x: net(x), backend="eager")
    return CompiledTask.from_callable("t", compiled)


WAYS = [
    through_itself,
    through_modules,
    through_bound_self,
    through_bound_method,
    through_closure,
    through_partial,
    through_global,
    through_compiled_function,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_buffers_are_as_before_wherever_the_module_is_found(
    way: Callable[[Net], CompiledTask],
) -> None:
    net = Net()
    before, calls = state_of(net), net.calls
    mean = net.norm.running_mean
    warmup_compiled(way(net), [sample()])
    assert same_state(net, before)
    assert net.calls is calls
    assert net.norm.running_mean is mean


def test_a_buffer_that_a_pending_backward_saved_keeps_its_version() -> None:
    net = Net()
    weight = torch.ones(4, requires_grad=True)
    pending = (weight * net.norm.running_mean).sum()
    warmup_compiled(CompiledTask.from_callable("t", net), [sample()])
    pending.backward()
    assert torch.equal(weight.grad, torch.zeros(4))


def test_a_buffer_whose_data_was_swapped_gets_its_storage_back() -> None:
    class Swaps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b.data = x
            return x * 2

    net, x = Swaps(), torch.zeros(3)
    address = net.b.data_ptr()
    warmup_compiled(CompiledTask.from_callable("t", net), [x])
    assert net.b.data_ptr() == address
    assert net.b.tolist() == [1, 1, 1]
    assert x.tolist() == [0, 0, 0]


def test_a_buffer_that_was_resized_gets_its_shape_and_values_back() -> None:
    class Grows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b.resize_(64).fill_(7)
            return x * 2

    net = Grows()
    warmup_compiled(CompiledTask.from_callable("t", net), [sample()])
    assert net.b.tolist() == [1, 1, 1]


def test_parameters_that_the_callable_steps_are_as_before() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = state_of(net)
    warmup_compiled(CompiledTask.from_callable("t", step), [sample()])
    assert same_state(net, before)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_gradients_that_exist_keep_their_object_and_value() -> None:
    net = Net()
    net(sample()).sum().backward()
    grads = [parameter.grad for parameter in net.parameters()]
    values = [grad.clone() for grad in grads]

    def runs_backward(x: torch.Tensor) -> torch.Tensor:
        net(x).sum().backward()
        return net(x)

    warmup_compiled(CompiledTask.from_callable("t", runs_backward), [sample()])
    for parameter, grad, value in zip(net.parameters(), grads, values, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, value)


def test_a_leaf_input_gets_no_gradient() -> None:
    x = sample().requires_grad_()
    net = Net()
    warmup_compiled(CompiledTask.from_callable("t", net), [x])
    assert x.grad is None


def test_the_backward_runs_and_fires_no_accumulate_hook() -> None:
    net, fired = Net(), []
    net.linear.weight.register_post_accumulate_grad_hook(
        lambda _: fired.append("accumulate")
    )
    net.linear.weight.register_hook(lambda grad: fired.append("register_hook"))
    warmup_compiled(CompiledTask.from_callable("t", net), [sample()])
    assert fired == ["register_hook"]
    warmup_compiled(CompiledTask.from_callable("t", net), [sample()], backward=False)
    assert fired == ["register_hook"]


def test_every_floating_output_takes_part_in_the_backward() -> None:
    seen: list[str] = []
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    a.register_hook(lambda _: seen.append("a"))
    b.register_hook(lambda _: seen.append("b"))

    def outputs() -> dict[str, Any]:
        return {"e": a * 2, "more": [(b * 3, torch.arange(3), None, "text")]}

    warmup_compiled(CompiledTask.from_callable("t", outputs))
    assert sorted(seen) == ["a", "b"]


def test_the_graph_behind_an_input_stays_usable() -> None:
    weight = torch.ones(3, requires_grad=True)
    x = (weight * 2).exp()
    seen: list[torch.Tensor | None] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        assert x.requires_grad and not x.is_leaf
        x.register_hook(lambda grad: seen.append(grad))
        return (x * x * weight).sum()

    warmup_compiled(CompiledTask.from_callable("t", call), [x])
    assert len(seen) == 1
    assert x._backward_hooks is None
    x.sum().backward()
    assert torch.allclose(weight.grad, 2 * torch.exp(torch.tensor(2.0)).expand(3))


def test_an_older_graph_that_a_closure_holds_stays_usable() -> None:
    weight = torch.ones(3, requires_grad=True)
    table = (weight * 2).exp()
    task = CompiledTask.from_callable("t", lambda x: (table * x).sum())
    warmup_compiled(task, [torch.ones(3)])
    table.sum().backward()
    assert weight.grad is not None


def test_inputs_are_handed_on_as_they_are() -> None:
    given = [
        torch.rand(4, 3).t(),
        torch.rand(3, requires_grad=True),
        torch.arange(3, dtype=torch.int16),
        None,
        torch.rand(2, 2).to_sparse(),
    ]
    got: list[Any] = []

    def call(*inputs: Any) -> torch.Tensor:
        got.extend(inputs)
        return inputs[0]

    warmup_compiled(CompiledTask.from_callable("t", call), given)
    assert all(a is b for a, b in zip(given, got, strict=True))
    assert got[0].stride() == (1, 3)


def test_structured_arguments_arrive_as_they_were_given() -> None:
    got: list[Any] = []

    def call(batch: dict[str, Any], *, scale: float, x: Any) -> dict[str, Any]:
        got.append((batch, scale, x))
        return {"loss": batch["c"][0] * scale}

    task = CompiledTask.from_callable("t", call)
    c = torch.ones(2)
    warmup_compiled(task, [{"c": [c], "n": 3}], {"scale": 0.5, "x": None})
    warmup_compiled(task, {"batch": {"c": [c], "n": 3}, "scale": 0.5, "x": None})
    assert len(got) == 2
    for batch, scale, x in got:
        assert batch["c"][0] is c
        assert (batch["n"], scale, x) == (3, 0.5, None)


@pytest.mark.parametrize("grad", [True, False])
def test_the_callable_runs_in_the_modes_of_the_caller(grad: bool) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
            )
        )
        return x * torch.ones(3, requires_grad=True)

    task = CompiledTask.from_callable("t", call)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        warmup_compiled(task, [sample()])
    assert task.stats()["covers_training"] == (1.0 if grad else 0.0)
    with torch.inference_mode():
        warmup_compiled(task, [sample()])
    assert seen == [(grad, False, True), (False, True, False)]


def test_a_run_without_grad_mode_is_warm_but_does_not_cover_training() -> None:
    net = Net()
    task = CompiledTask.from_callable("t", net)
    assert not task.is_warm()
    with torch.no_grad():
        warmup_compiled(task, [sample()])
    assert task.is_warm()
    assert task.stats()["covers_training"] == 0
    warmup_compiled(task, [sample()], backward=False)
    assert task.stats()["covers_training"] == 0
    warmup_compiled(task, [sample()])
    assert task.stats()["covers_training"] == 1
    assert task.stats()["runs"] == 3


def test_modes_that_the_callable_leaves_switched_are_undone() -> None:
    def leaves_modes(x: torch.Tensor) -> torch.Tensor:
        torch._C._set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        raise ValueError("left")

    with pytest.raises(ValueError, match="left"):
        warmup_compiled(CompiledTask.from_callable("t", leaves_modes), [sample()])
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_outputs_and_saved_tensors_are_dead_afterwards() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(3, requires_grad=True).exp()
        out = hidden * hidden
        alive.extend([weakref.ref(hidden), weakref.ref(out)])
        return out

    gc.disable()
    try:
        warmup_compiled(CompiledTask.from_callable("t", call), [sample()])
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()


def fails(net: Net, kept: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def user_step(x: torch.Tensor) -> torch.Tensor:
        random.random()
        out = net(x)
        kept.append(weakref.ref(out))
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("bad task") from None

    return user_step


def test_an_error_keeps_type_and_user_frame_names_the_task_and_leaves_no_trace() -> (
    None
):
    net, kept = Net(), []
    task = CompiledTask.from_callable("water", fails(net, kept))
    before, stream, python = state_of(net), torch.get_rng_state(), random.getstate()
    with pytest.raises(
        ValueError, match=r"^bad task \(while warming task 'water'\)$"
    ) as e:
        warmup_compiled(task, [sample()])
    assert "user_step" in [frame.name for frame in traceback.extract_tb(e.tb)]
    assert same_state(net, before)
    assert torch.equal(torch.get_rng_state(), stream)
    assert random.getstate() == python
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.is_grad_enabled()
    # The exception, as sys.last_value would, keeps frames: these hold nothing.
    sys.last_value = e.value
    assert kept[0]() is None
    assert task.stats() | {"forward_s": 0, "backward_s": 0} == {
        "runs": 0,
        "failures": 1,
        "eager_runs": 0,
        "forward_s": 0,
        "backward_s": 0,
        "covers_training": 0,
    }
    assert not task.is_warm()


class FailsInBackward(torch.autograd.Function):
    """Raises in its backward, with a local that must not survive."""

    kept: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        local = grad + 1
        FailsInBackward.kept = weakref.ref(local)
        raise OverflowError("in the backward")


def test_an_error_in_the_backward_is_treated_alike() -> None:
    net = Net()
    before, stream = state_of(net), torch.get_rng_state()
    task = CompiledTask.from_callable("t", lambda x: FailsInBackward.apply(net(x)))
    with pytest.raises(OverflowError, match=r"in the backward.*warming task 't'"):
        warmup_compiled(task, [sample()])
    assert same_state(net, before)
    assert torch.equal(torch.get_rng_state(), stream)
    assert FailsInBackward.kept() is None


class Coded(Exception):
    """An exception whose text is not its first argument."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def test_an_exception_of_the_users_own_class_arrives_as_itself() -> None:
    raised = Coded(7)

    def call() -> None:
        raise raised

    with pytest.raises(Coded) as e:
        warmup_compiled(CompiledTask.from_callable("t", call))
    assert e.value is raised
    assert e.value.code == 7
    if sys.version_info >= (3, 11):
        assert e.value.__notes__ == ["(while warming task 't')"]


def test_keyboard_interrupt_passes_through_with_everything_put_back() -> None:
    net = Net()
    before = state_of(net)

    def call(x: torch.Tensor) -> torch.Tensor:
        net(x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmup_compiled(CompiledTask.from_callable("t", call), [sample()])
    assert same_state(net, before)


@pytest.mark.parametrize("result", [None, 3.5, {}, "loss", [None]])
def test_a_callable_that_returns_no_tensor_is_a_clear_error(result: Any) -> None:
    net = Net()
    before, stream = state_of(net), torch.get_rng_state()

    def call(x: torch.Tensor) -> Any:
        net(x)
        return result

    with pytest.raises(TypeError, match="callable of task 't' to return a tensor") as e:
        warmup_compiled(CompiledTask.from_callable("t", call), [sample()])
    assert f"got {type(result).__name__}" in str(e.value)
    assert same_state(net, before)
    assert torch.equal(torch.get_rng_state(), stream)


def test_bad_arguments_are_named_before_anything_runs() -> None:
    net = Net()
    task = CompiledTask.from_callable("t", net)
    with pytest.raises(TypeError, match=r"got a Tensor. Write \[tensor\]"):
        warmup_compiled(task, sample())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a CompiledTask, got Net"):
        warmup_compiled(net, [sample()])  # type: ignore[arg-type]
    script = torch.jit.script(torch.nn.Linear(3, 2))
    scripted = CompiledTask.from_script("s", script)
    with pytest.raises(TypeError, match="task 's', whose callable is torchscript"):
        warmup_compiled(scripted, [sample()], {"scale": 2})
    task.close()
    task.close()
    assert task.backend() == "closed"
    with pytest.raises(RuntimeError, match="got task 't' after close"):
        warmup_compiled(task, [sample()])


def test_a_torchscript_module_is_warmed_without_a_trace() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 4)
            self.norm = torch.nn.BatchNorm1d(4)
            self.calls = 0
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            self.calls += 1
            self.total = self.total + 1
            return {"out": [self.norm(self.linear(x)), torch.rand(2)]}

    script = torch.jit.script(Counts())
    before, stream = state_of(script), torch.get_rng_state()
    task = CompiledTask.from_script("s", script)
    warmup_compiled(task, [sample()])
    assert same_state(script, before)
    assert script.calls == 0
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(parameter.grad is None for parameter in script.parameters())
    assert task.is_warm()
    assert task.stats()["covers_training"] == 1


def test_an_error_inside_torchscript_names_the_task() -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.size(0) > 2:
                raise ValueError("too many rows")
            return x

    script = torch.jit.script(Fails())
    task = CompiledTask.from_script("s", script)
    with pytest.raises(Exception, match="too many rows") as e:
        warmup_compiled(task, [sample()])
    assert "warming task 's'" in str(e.value)
    with pytest.raises(RuntimeError, match="warming task 's'"):
        warmup_compiled(task, [])  # the schema's own text


def test_warm_ups_of_several_threads_do_not_mix_their_states() -> None:
    net = Net()
    task = CompiledTask.from_callable("t", net)
    before, stream = state_of(net), torch.get_rng_state()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                warmup_compiled(task, [sample()])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert task.stats()["runs"] == 80
    assert same_state(net, before)
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_thread_that_waits_for_its_turn_holds_no_interpreter_lock() -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert leave.wait(60)
        return x * 2

    first = threading.Thread(
        target=warmup_compiled, args=(CompiledTask.from_callable("a", slow), [sample()])
    )
    second_task = CompiledTask.from_callable("b", lambda x: x * 2)
    second = threading.Thread(target=warmup_compiled, args=(second_task, [sample()]))
    first.start()
    assert inside.wait(60)
    second.start()
    # Were the lock held there, this thread could not run on.
    for _ in range(3):
        second.join(0.05)
        assert second.is_alive()
    leave.set()
    first.join(60)
    second.join(60)
    assert second_task.is_warm()


def test_a_callable_may_warm_another_task() -> None:
    net = Net()
    inner = CompiledTask.from_callable("inner", net)

    def outer(x: torch.Tensor) -> torch.Tensor:
        warmup_compiled(inner, {"x": x})
        return net(x)

    before, stream = state_of(net), torch.get_rng_state()
    warmup_compiled(CompiledTask.from_callable("outer", outer), {"x": sample()})
    assert inner.is_warm()
    assert same_state(net, before)
    assert torch.equal(torch.get_rng_state(), stream)


def runs_backward() -> tuple[Net, CompiledTask]:
    net = Net()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():  # off inside of an autograd hook
            net(x).sum().backward()
        return net(x).sum()

    return net, CompiledTask.from_callable("t", step)


def test_a_callable_that_runs_backward_works_from_a_worker_thread() -> None:
    net, task = runs_backward()
    thread = threading.Thread(target=warmup_compiled, args=(task, [sample()]))
    thread.start()
    thread.join(60)
    assert task.is_warm()
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_callable_that_runs_backward_works_from_an_autograd_hook() -> None:
    net, task = runs_backward()
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: warmup_compiled(task, [sample()]))
    y.sum().backward()
    assert task.is_warm()
    assert x.grad.tolist() == [2, 2, 2]
    assert all(parameter.grad is None for parameter in net.parameters())


class Forks(torch.nn.Module):
    """Warms its handle in a TorchScript task of another thread."""

    def __init__(self, task: CompiledTask) -> None:
        super().__init__()
        self.task = task

    def warm(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.deepmd.warmup_compiled(self.task, [x])
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        future = torch.jit.fork(self.warm, x)
        return torch.jit.wait(future)


def test_a_callable_that_runs_backward_works_from_a_torchscript_fork() -> None:
    net, task = runs_backward()
    script = torch.jit.script(Forks(task))
    assert torch.equal(script(sample()), sample())
    assert task.is_warm()
    assert all(parameter.grad is None for parameter in net.parameters())
