# SPDX-License-Identifier: LGPL-3.0-or-later
"""Handles: whom they keep alive, how they are copied; keep_alive, trace_inputs."""

from __future__ import annotations

import copy
import functools
import gc
import io
import multiprocessing
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import deepmd_prewarm
import pytest
import torch
from deepmd_prewarm import CompiledTask, keep_alive, trace_inputs, warmup_compiled


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


X = torch.arange(12.0).reshape(4, 3)

WAYS: dict[str, Callable[[Net], Any]] = {
    "module": lambda net: net,
    "bound method": lambda net: net.forward,
    "closure": lambda net: lambda x: net(x),
    "closure in closure": lambda net: (lambda inner: lambda x: inner(x))(
        lambda x: net(x)
    ),
    "default": lambda net: lambda x, net=net: net(x),
    "keyword default": lambda net: lambda x, *, net=net: net(x),
    "partial": lambda net: functools.partial(lambda net, x: net(x), net),
    "partial of method": lambda net: functools.partial(net.forward),
    "keyword of partial": lambda net: functools.partial(lambda x, net: net(x), net=net),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_handle_keeps_no_model_alive_and_says_when_it_is_gone(way: str) -> None:
    net = Net()
    task = CompiledTask.from_callable("water", WAYS[way](net), modules=[net])
    warmup_compiled(task, [X])
    alive = weakref.ref(net)
    del net
    assert alive() is None
    with pytest.raises(RuntimeError, match=r"module of task 'water'.*\(?Net\)? was"):
        warmup_compiled(task, [X])


@pytest.mark.parametrize("way", ["container", "compiled", "object"])
def test_a_cycle_of_module_handle_closure_module_is_collected(way: str) -> None:
    class Trainer:
        def __init__(self, net: Net) -> None:
            self.nets = [net]

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.nets[0](x)

    net = Net()
    fn: Any
    if way == "container":
        nets = {"a": net}
        fn = functools.partial(lambda nets, x: nets["a"](x), nets)
        del nets
    elif way == "compiled":
        fn = torch.compile(functools.partial(lambda m, x: m(x), net), backend="eager")
    else:
        fn = Trainer(net).step
    net.task = CompiledTask.from_callable("t", fn)
    warmup_compiled(net.task, [X])
    alive = weakref.ref(net)
    del net, fn
    gc.collect()
    if way == "compiled":  # Dynamo's own cache held it until now
        torch._dynamo.reset()
        gc.collect()
    assert alive() is None


def test_a_handle_that_torchscript_shares_stays_open_when_python_drops_it() -> None:
    class Holder(torch.nn.Module):
        def __init__(self, task: CompiledTask) -> None:
            super().__init__()
            self.task = task

        def forward(self, x: torch.Tensor) -> str:
            torch.ops.deepmd.warmup_compiled(self.task, [x])
            return self.task.name()

    net = Net()
    holder = torch.jit.script(Holder(CompiledTask.from_callable("kept", net.forward)))
    gc.collect()
    assert holder(X) == "kept"
    assert holder.task.is_warm()


def test_what_a_closure_writes_reaches_its_owner() -> None:
    net, count = Net(), 0

    def step(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        nonlocal count
        count += 1
        return net(x) * scale

    step.note = "kept"  # type: ignore[attr-defined]
    task = CompiledTask.from_callable("t", step)
    warmup_compiled(task, [X])
    warmup_compiled(task, [X], {"scale": 3.0})
    assert count == 2


def test_a_closure_that_calls_itself_can_be_a_task() -> None:
    net = Net()

    def step(x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return net(x) if depth == 0 else step(x, depth - 1)

    task = CompiledTask.from_callable("t", step)
    warmup_compiled(task, [X])
    assert task.is_warm()


def test_bad_input_to_a_constructor_is_named() -> None:
    with pytest.raises(TypeError, match="expected a callable, got int"):
        CompiledTask.from_callable("t", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got str"):
        CompiledTask.from_callable("t", print, modules=["a"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="expected a name, got ''"):
        CompiledTask.from_callable("", Net())
    with pytest.raises(TypeError, match="expected a ScriptModule, got Net"):
        CompiledTask.from_script("t", Net())  # type: ignore[arg-type]
    script = torch.jit.script(Net())
    with pytest.raises(ValueError, match="expected a method of Net, got 'step'"):
        CompiledTask.from_script("t", script, "step")


def test_a_handle_prints_name_and_backend() -> None:
    net, script = Net(), torch.jit.script(Net())
    task = CompiledTask.from_callable("water", net)
    assert repr(task) == str(task) == "CompiledTask('water', backend='python')"
    assert isinstance(task, torch.ScriptObject)
    assert CompiledTask.from_callable("s", script).backend() == "torchscript"


LOST = r"task 'water' with a python callable.*process-local.*from_callable"


def test_copying_or_pickling_a_process_local_handle_is_a_clear_error() -> None:
    net = Net()
    task = CompiledTask.from_callable("water", net)
    for copying in (copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))):
        with pytest.raises(RuntimeError, match=LOST):
            copying(task)
    net.task = task
    with pytest.raises(RuntimeError, match=LOST):
        copy.deepcopy(net)


def use(task: Any) -> None:
    raise AssertionError("never reached")


def test_spawning_with_a_process_local_handle_is_a_clear_error() -> None:
    # The child reads the arguments with pickle, before it calls anything.
    net = Net()
    task = CompiledTask.from_callable("water", net)
    arguments = multiprocessing.reduction.ForkingPickler.dumps((use, task))
    with pytest.raises(RuntimeError, match=LOST):
        pickle.loads(arguments)


class Trainer(torch.nn.Module):
    """Warms its head through handles, as an exported trainer does."""

    def __init__(self, head: torch.nn.Module, task: Any) -> None:
        super().__init__()
        self.head = head
        self.first = task
        self.second = task

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.deepmd.warmup_compiled(self.first, [x])
        return self.head(x)

    @torch.jit.export
    def both(self) -> tuple[str, bool, bool]:
        warm = self.second.stats()["runs"] > 0
        return self.first.name(), self.first.is_warm(), warm

    @torch.jit.export
    def close(self) -> str:
        self.first.close()
        return self.second.backend()


def exported() -> tuple[Any, Any]:
    head = torch.jit.script(Net())
    return torch.jit.script(Trainer(head, CompiledTask.from_script("h", head))), head


def reload(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def test_a_torchscript_handle_is_saved_with_its_module_and_stays_shared() -> None:
    trainer, head = exported()
    once = reload(trainer)
    twice = reload(once)
    del trainer, head, once
    gc.collect()
    assert twice.both() == ("h", False, False)
    twice(X)
    assert twice.both() == ("h", True, True)
    assert twice.close() == "closed"


def test_a_loaded_handle_and_its_trainer_share_one_module() -> None:
    trainer, _ = exported()
    loaded = reload(trainer)
    # A NaN in the trainer's head must reach the handle's run.
    loaded.head.linear.weight.register_hook(lambda grad: seen.append(grad))
    seen: list[torch.Tensor] = []
    loaded(X)
    assert len(seen) == 1


def test_a_deep_copy_of_an_exported_trainer_has_a_handle_of_its_own() -> None:
    trainer, _ = exported()
    trainer(X)
    twin = copy.deepcopy(trainer)
    assert twin.both() == ("h", False, False)
    twin(X)
    assert twin.both() == ("h", True, True)


def test_frozen_and_traced_trainers_still_warm() -> None:
    trainer, _ = exported()
    # Frozen into a constant a handle can run, but torch does not save the code
    # of its module; preserved it goes along.
    kept = ["both", "first", "second"]
    frozen = torch.jit.freeze(trainer.eval(), preserved_attrs=kept)
    assert torch.equal(frozen(X), trainer.head(X))
    assert frozen.both()[1]
    loaded = reload(frozen)
    del frozen
    loaded(X)
    assert loaded.both()[1]


def test_a_traced_trainer_still_warms() -> None:
    class Traced(Trainer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # The tracer knows no list of optional tensors.
            torch.ops.deepmd.warmup_compiled.list(self.first, [x])
            return self.head(x)

    head = torch.jit.script(Net())
    task = CompiledTask.from_script("h", head)
    traced = torch.jit.trace(Traced(head, task), (X,))
    assert "deepmd::warmup_compiled" in str(traced.inlined_graph)
    runs = task.stats()["runs"]
    assert torch.equal(traced(X), head(X))
    assert task.stats()["runs"] == runs + 1
    assert torch.equal(reload(traced)(X), head(X))


def test_a_process_local_handle_in_a_saved_module_is_an_error_when_loaded() -> None:
    head, net = torch.jit.script(Net()), Net()
    task = CompiledTask.from_callable("water", net)
    trainer = torch.jit.script(Trainer(head, task))
    buffer = io.BytesIO()
    torch.jit.save(trainer, buffer)  # Inductor must be able to ask for the token
    buffer.seek(0)
    with pytest.raises(RuntimeError, match=LOST):
        torch.jit.load(buffer)
    with pytest.raises(RuntimeError, match=LOST):
        copy.deepcopy(trainer)


def test_a_handle_inside_its_own_module_is_refused_when_saved() -> None:
    class Own(torch.nn.Module):
        def __init__(self, task: Any) -> None:
            super().__init__()
            self.task = task
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    other = torch.jit.script(Net())
    own = torch.jit.script(Own(CompiledTask.from_script("o", other)))
    own.task = CompiledTask.from_script("own", own)
    warmup_compiled(own.task, [X])
    with pytest.raises(RuntimeError, match="task 'own' as an attribute of the module"):
        torch.jit.save(own, io.BytesIO())


def test_keep_alive_ties_the_graph_to_the_compiled_module() -> None:
    net = Net()
    graph = torch.fx.symbolic_trace(Net())
    compiled = torch.compile(net, backend="eager")
    keys = list(compiled.state_dict())
    assert keep_alive(compiled, graph) is compiled
    assert list(compiled.state_dict()) == keys
    assert graph not in list(compiled.modules())
    compiled.train()  # walks submodules
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is not None
    del compiled, net
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", ["function", "compiled function", "partial", "object"])
def test_keep_alive_takes_a_raw_compiled_callable(kind: str) -> None:
    class Compiled:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    compiled: Any = {
        "function": lambda x: x,
        "compiled function": torch.compile(lambda x: x, backend="eager"),
        "partial": functools.partial(lambda x: x),
        "object": Compiled(),
    }[kind]
    graph = torch.fx.symbolic_trace(Net())
    keep_alive(compiled, graph)
    assert compiled._traced_lower_ref is graph
    with pytest.raises(RuntimeError, match="_traced_lower_ref"):
        keep_alive(compiled, graph)
    assert compiled._traced_lower_ref is graph


def test_keep_alive_refuses_what_takes_no_attribute() -> None:
    with pytest.raises(TypeError, match="got builtin_function_or_method"):
        keep_alive(print, object())


def test_trace_inputs_are_released_on_exit() -> None:
    with trace_inputs(coord=torch.rand(64, 3), nlist=torch.zeros(9), none=None) as t:
        coord, nlist = t["coord"], t["nlist"]
        assert (coord * 2).shape == (64, 3)
        del coord
    assert t == {}
    # Still named here, so protected by the wrapper.
    assert nlist.sum() == 0


def test_trace_inputs_are_released_when_the_trace_raises() -> None:
    storages: list[Any] = []
    with (
        pytest.raises(ValueError, match="half-way"),
        trace_inputs(x=torch.rand(64)) as t,
    ):
        storages.append(weakref.ref(t["x"].untyped_storage()))
        raise ValueError("half-way")
    assert t == {}
    assert storages[0]() is None


def test_the_public_names_are_those_of_the_package() -> None:
    for name in ("CompiledTask", "keep_alive", "trace_inputs", "warmup_compiled"):
        assert getattr(deepmd_prewarm, name).__module__ == "deepmd_prewarm.tasks"
