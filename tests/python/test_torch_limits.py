# SPDX-License-Identifier: LGPL-3.0-or-later
"""What torch cannot do with these operators: the README's table, line by line.

Each test fails when torch learns it, so that the table can lose a line. None of
them may ever show a call that was dropped in silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepmd_prewarm
import pytest
import torch
import torch._inductor.config
from torch.fx.experimental.proxy_tensor import make_fx

deepmd_prewarm.load()
pytest_plugins = ["fresh_compiler"]
README = (Path(__file__).parents[2] / "README.md").read_text()
X = torch.ones(4, 4)


class Releasing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        torch.ops.deepmd.release_trace_inputs([y])
        return x @ x


class Emptying(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.deepmd.safe_empty_cache(torch.device("cpu"))
        return x @ x


class Warming(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.handle = deepmd_prewarm.CompiledTask.from_callable("t", lambda x: x @ x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.deepmd.warmup_compiled(self.handle, [x])
        return x @ x


def listed(line: str) -> None:
    """Expect a line of the README's table that starts like this."""
    table = README.split("### What torch cannot do", 1)[1].split("\n## ", 1)[0]
    assert f"\n| {line}" in table, line


def test_aotinductor_refuses_a_release(calls: list[str], tmp_path: Path) -> None:
    listed("a release in an AOTInductor package")
    program = torch.export.export(Releasing(), (X,))
    with pytest.raises(Exception, match="Unsupported return type") as raised:
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "releasing.pt2")
        )
    assert type(raised.value).__name__ == "InductorError"
    assert calls == []


def test_cpp_wrapper_refuses_a_release(calls: list[str]) -> None:
    listed("a release under `cpp_wrapper`")
    with (
        torch._inductor.config.patch(cpp_wrapper=True),
        pytest.raises(Exception) as raised,
    ):
        torch.compile(Releasing(), fullgraph=True)(X)
    assert type(raised.value).__name__ == "InductorError"
    assert calls == []


@pytest.mark.parametrize("module", [Releasing, Emptying])
def test_draft_export_runs_the_operators(module: Any, calls: list[str]) -> None:
    listed("`torch.export.draft_export`")
    torch.export.draft_export(module(), (X,))
    assert len(calls) == 1


@pytest.mark.parametrize("module", [Releasing, Emptying])
def test_a_real_pre_dispatch_trace_runs_the_operators(
    module: Any, calls: list[str]
) -> None:
    listed('`make_fx(pre_dispatch=True, tracing_mode="real")`')
    make_fx(module(), tracing_mode="real", pre_dispatch=True)(X)
    assert len(calls) == 1


def test_symbolic_trace_runs_a_call_without_a_tensor(calls: list[str]) -> None:
    listed("`torch.fx.symbolic_trace`")
    graph = torch.fx.symbolic_trace(Releasing())
    assert calls == []
    graph(X)
    assert calls == ["release_trace_inputs"]
    torch.fx.symbolic_trace(Emptying())
    assert calls == ["release_trace_inputs", "safe_empty_cache"]


@pytest.mark.parametrize("module", [Releasing, Emptying])
def test_jit_trace_refuses_a_call_that_no_scripted_function_makes(
    module: Any, calls: list[str]
) -> None:
    listed("`torch.jit.trace` of a direct call")
    with pytest.raises(RuntimeError, match="unsupported input"):
        torch.jit.trace(module(), X)
    assert calls == []


def test_strict_export_refuses_a_handle_that_is_an_attribute(
    calls: list[str],
) -> None:
    listed("`torch.export.export(strict=True)` of a module that holds a handle")
    # torch 2.11 asserts that it is a node of the graph, 2.15 asks for its `__eq__`.
    with pytest.raises((AssertionError, NotImplementedError)):
        torch.export.export(Warming(), (X,), strict=True)
    assert calls == []
    torch.export.export(Warming(), (X,)).module()(X)
    assert calls == ["warmup_compiled"]


def test_a_handle_frozen_into_a_constant_is_saved_without_its_module(
    tmp_path: Path,
) -> None:
    listed("a handle in a frozen module")

    class Square(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    class Trainer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = torch.jit.script(Square())
            self.handle = deepmd_prewarm.CompiledTask.from_script("t", self.square)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.ops.deepmd.warmup_compiled(self.handle, [x])
            return self.square(x)

    trainer = torch.jit.script(Trainer().eval())
    constant, kept = (str(tmp_path / name) for name in ("constant.pt", "kept.pt"))
    frozen = torch.jit.freeze(trainer)
    assert torch.equal(frozen(X), X @ X)
    assert trainer.handle.stats()["runs"] == 1
    frozen.save(constant)
    with pytest.raises(RuntimeError, match=r"Unknown type name '__torch__\..*Square'"):
        torch.jit.load(constant)
    torch.jit.freeze(trainer, preserved_attrs=["handle"]).save(kept)
    loaded = torch.jit.load(kept)
    assert torch.equal(loaded(X), X @ X)
    assert loaded.handle.is_warm()


def test_aot_eager_cannot_see_what_its_partitioner_saved() -> None:
    listed('`torch.compile(backend="aot_eager")` of a training step')

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        z = y @ y
        torch.ops.deepmd.release_trace_inputs([y])
        return z.sum()

    torch._dynamo.reset()
    weight = X.clone().requires_grad_()
    loss = torch.compile(function, backend="aot_eager", fullgraph=True)(X, weight)
    with pytest.raises(RuntimeError, match="release_trace_inputs"):
        loss.backward()
