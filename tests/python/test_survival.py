# SPDX-License-Identifier: LGPL-3.0-or-later
"""A call whose result nobody uses runs exactly once, in program order.

On every route from eager mode to an exported and reloaded graph. The programs
have no pointwise arithmetic, so that Inductor needs no C++ compiler.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import deepmd_prewarm
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

deepmd_prewarm.load()
pytest_plugins = ["fresh_compiler"]
X, W = torch.randn(4, 4), torch.randn(4, 4)
Program = Callable[..., Any]


class Acting(torch.nn.Module):
    """Calls every operator that a graph may hold, between two products."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        torch.ops.deepmd.release_trace_inputs([y, None])
        torch.ops.deepmd.safe_empty_cache(torch.device("cpu"))
        torch.ops.deepmd.release_trace_inputs([y])
        torch.ops.deepmd.sync_ranks("group", "phase")
        torch.ops.deepmd.safe_empty_cache(x.device)
        return x @ w


EXPECTED = [
    "release_trace_inputs",
    "safe_empty_cache",
    "release_trace_inputs",
    "sync_ranks",
    "safe_empty_cache",
]


def reloaded_script(module: torch.jit.ScriptModule) -> Program:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def reloaded_program(program: torch.export.ExportedProgram) -> Program:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


def without_dead_code(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def exported(program: torch.nn.Module, strict: bool = False) -> Any:
    return torch.export.export(program, (X, W), strict=strict)


def script(program: torch.nn.Module) -> torch.jit.ScriptModule:
    return torch.jit.script(program.eval())


ROUTES: dict[str, Callable[[torch.nn.Module], Program]] = {
    "eager": lambda p: p,
    "script": script,
    "script, frozen": lambda p: torch.jit.freeze(script(p)),
    "script, optimized": lambda p: torch.jit.optimize_for_inference(script(p)),
    "script, saved": lambda p: reloaded_script(script(p)),
    "script, frozen, saved": lambda p: reloaded_script(torch.jit.freeze(script(p))),
    **{
        f"make_fx {mode}": lambda p, mode=mode: without_dead_code(
            make_fx(p, tracing_mode=mode)(X, W)
        )
        for mode in ("real", "fake", "symbolic")
    },
    "make_fx, pre-dispatch": lambda p: without_dead_code(
        make_fx(p, tracing_mode="symbolic", pre_dispatch=True)(X, W)
    ),
    "make_fx, compiled": lambda p: torch.compile(
        make_fx(p, tracing_mode="symbolic")(X, W), fullgraph=True
    ),
    **{
        f"compile {backend}": lambda p, backend=backend: torch.compile(
            p, backend=backend, fullgraph=True
        )
        for backend in ("eager", "aot_eager", "inductor")
    },
    "compile inductor, dynamic": lambda p: torch.compile(
        p, fullgraph=True, dynamic=True
    ),
    "compile inductor, reduce-overhead": lambda p: torch.compile(
        p, fullgraph=True, mode="reduce-overhead"
    ),
    "export": lambda p: exported(p).module(),
    "export strict": lambda p: exported(p, strict=True).module(),
    "export, decomposed": lambda p: exported(p).run_decompositions().module(),
    "export, saved": lambda p: reloaded_program(exported(p)),
    "export, decomposed, saved": lambda p: reloaded_program(
        exported(p).run_decompositions()
    ),
    "export, compiled": lambda p: torch.compile(exported(p).module(), fullgraph=True),
}


@pytest.mark.parametrize("route", ROUTES)
def test_each_call_runs_once_in_program_order_and_never_while_tracing(
    route: str, calls: list[str]
) -> None:
    program = ROUTES[route](Acting())
    assert calls == []
    for _ in range(2):
        calls.clear()
        torch.testing.assert_close(program(X, W), X @ W)
        assert calls == EXPECTED


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_training_graph_runs_each_call_once_forward_and_none_backward(
    backend: str, calls: list[str]
) -> None:
    weight = W.clone().requires_grad_()
    program = torch.compile(Acting(), backend=backend, fullgraph=True)
    loss = program(X, weight).sum()
    assert calls == EXPECTED
    loss.backward()
    assert calls == EXPECTED
    torch.testing.assert_close(weight.grad, X.sum(0)[:, None].expand(4, 4))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_modes_change_nothing(mode: Any, calls: list[str]) -> None:
    with mode():
        torch.compile(Acting(), fullgraph=True)(X, W)
    assert calls == EXPECTED


def test_a_graph_break_around_an_operator_loses_no_call(calls: list[str]) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch.ops.deepmd.sync_ranks("group", "before")
        torch.ops.deepmd.cache_bytes(torch.device("cpu"))
        torch.ops.deepmd.explain_release([x])
        torch.ops.deepmd.scalarize_losses({"loss": x})
        torch.ops.deepmd.release_trace_inputs([])
        torch.ops.deepmd.safe_empty_cache(torch.device("cpu"))
        return x @ w

    torch.compile(program)(X, W)
    assert calls == [
        "sync_ranks",
        "cache_bytes",
        "explain_release",
        "scalarize_losses",
        "release_trace_inputs",
        "safe_empty_cache",
    ]


ASKING: dict[str, Program] = {
    "explain_release": lambda x: torch.ops.deepmd.explain_release([x]),
    "cache_bytes": lambda x: torch.ops.deepmd.cache_bytes(x.device),
    "scalarize_losses": lambda x: torch.ops.deepmd.scalarize_losses({"loss": x}),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_no_graph_can_hold_is_refused_by_name(name: str, calls: list[str]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        ASKING[name](x)
        return x @ x

    with pytest.raises(torch._dynamo.exc.Unsupported, match=name):
        torch.compile(program, fullgraph=True)(X)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return program(x)

    with pytest.raises(Exception, match=name):
        torch.export.export(Module(), (X,), strict=False)
    with pytest.raises(Exception, match=name):
        make_fx(program, tracing_mode="symbolic")(X)
    assert calls == []
