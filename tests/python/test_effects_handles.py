# SPDX-License-Identifier: LGPL-3.0-or-later
"""A handle in traced, compiled and exported graphs."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import deepmd_prewarm
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

deepmd_prewarm.load()
pytest_plugins = ["fresh_compiler"]
pytestmark = pytest.mark.usefixtures("fresh_compiler")
X = torch.ones(4, 4)
LOCAL = "Compiled handles are process-local"


class Task:
    """A handle on a callable that notes its runs and what is live then."""

    def __init__(self) -> None:
        self.runs: list[float] = []
        self.handle = deepmd_prewarm.CompiledTask.from_callable("task", self.run)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(float(x.sum()))
        return x @ x


class Warming(torch.nn.Module):
    """Warms, then releases what it warmed with, then empties, then meets."""

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self.handle = handle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        torch.ops.deepmd.warmup_compiled(self.handle, [y, None][:1])
        torch.ops.deepmd.release_trace_inputs([y])
        torch.ops.deepmd.safe_empty_cache(torch.device("cpu"))
        return x @ x


@pytest.fixture
def task() -> Task:
    return Task()


ROUTES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "eager": lambda m: m,
    "make_fx real": lambda m: make_fx(m, tracing_mode="real")(X),
    "make_fx symbolic": lambda m: make_fx(m, tracing_mode="symbolic")(X),
    "compile eager": lambda m: torch.compile(m, backend="eager", fullgraph=True),
    "compile aot_eager": lambda m: torch.compile(
        m, backend="aot_eager", fullgraph=True
    ),
    "compile inductor": lambda m: torch.compile(m, fullgraph=True),
    "export": lambda m: torch.export.export(m, (X,)).module(),
    "export, decomposed": lambda m: (
        torch.export.export(m, (X,)).run_decompositions().module()
    ),
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_warm_up_in_a_graph_runs_once_before_the_release_of_its_input(
    route: str, task: Task
) -> None:
    program = ROUTES[route](Warming(task.handle))
    assert task.runs == []
    assert program(X).sum() == 64
    assert task.runs == [64.0]


def test_a_handle_passes_as_an_argument(task: Task) -> None:
    def function(x: torch.Tensor, handle: Any) -> torch.Tensor:
        torch.ops.deepmd.warmup_compiled(handle, [x])
        return x @ x

    torch.compile(function, fullgraph=True)(X, task.handle)
    assert task.runs == [16.0]


def test_tracing_with_a_handle_warns_of_nothing(
    task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("torch._library.fake_class_registry")
    logger.addHandler(caplog.handler)
    torch.export.export(Warming(task.handle), (X,))
    logger.removeHandler(caplog.handler)
    # Torch's own tracer of compilations logs without a text, below WARNING.
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert loud == []


def test_a_saved_export_with_a_process_local_handle_says_so_when_loaded(
    task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Warming(task.handle), (X,)), buffer)
    buffer.seek(0)
    logger = logging.getLogger("torch.export")
    logger.addHandler(caplog.handler)
    with pytest.raises(RuntimeError):
        torch.export.load(buffer)
    logger.removeHandler(caplog.handler)
    assert LOCAL in caplog.text


def test_a_copied_or_unpickled_handle_says_that_it_is_process_local(
    task: Task,
) -> None:
    with pytest.raises(RuntimeError, match=LOCAL):
        copy.deepcopy(Warming(task.handle))
    with pytest.raises(RuntimeError, match=LOCAL):
        pickle.loads(pickle.dumps(task.handle))


def test_a_wrapper_that_holds_a_handle_keeps_the_state_dict(task: Task) -> None:
    plain = torch.nn.Linear(4, 4)
    keys = list(plain.state_dict())
    plain.handle = task.handle
    assert list(plain.state_dict()) == keys
