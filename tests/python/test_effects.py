# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the operators really do when a compiled graph runs, and while it is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import deepmd_prewarm
import pytest
import torch
from fresh_process import output
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

deepmd_prewarm.load()
pytest_plugins = ["fresh_compiler"]
pytestmark = pytest.mark.usefixtures("fresh_compiler")
release = torch.ops.deepmd.release_trace_inputs
BYTES = 16 * 16 * 4


def ones(**options: Any) -> torch.Tensor:
    return torch.ones(16, 16, **options)


def compiled(function: Callable[..., Any], backend: str = "inductor") -> Any:
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
class TestReleaseInACompiledFunction:
    def test_an_input_is_freed_after_its_readers(self, backend: str) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            y = x @ x
            return y, release([x])

        x = ones()
        y, freed = compiled(function, backend)(x)
        assert freed == BYTES and y.sum() == 16**3
        with pytest.raises(RuntimeError, match="release_trace_inputs"):
            x.sum()

    def test_an_intermediate_is_freed_and_nothing_keeps_it(self, backend: str) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            y = x @ x
            z = y @ y
            freed = release([y])
            torch.ops.deepmd.safe_empty_cache(torch.device("cpu"))
            a = z @ z
            return a @ a, freed

        program = compiled(function, backend)
        for _ in range(2):  # the first run is made under a checking mode
            result, freed = program(ones() / 16)
            assert freed == BYTES
            torch.testing.assert_close(result, ones() / 16)

    def test_what_autograd_saved_is_kept_or_its_backward_says_who_freed_it(
        self, backend: str
    ) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x @ w
            z = y @ y
            release([y])
            return z.sum()

        weight = ones(requires_grad=True)
        loss = compiled(function, backend)(ones(), weight)
        assert loss == 16 * 16 * 16**3
        if backend == "aot_eager":
            # The partitioner, not autograd, saves y: nobody can see that.
            with pytest.raises(RuntimeError, match="release_trace_inputs"):
                loss.backward()
            return
        loss.backward()
        assert torch.equal(weight.grad, ones() * 2 * 16**3)


class TestReleaseUnderInductor:
    """The compiler moves, merges and saves; eager would refuse or be right."""

    def test_a_returned_tensor_is_kept(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            y = x @ x
            return y, release([y, None])

        y, freed = compiled(function)(ones())
        assert freed == 0 and y.sum() == 16**3

    def test_a_tensor_whose_view_is_returned_is_kept(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            y = x @ x
            return y.t(), release([y])

        y, freed = compiled(function)(ones())
        assert freed == 0 and y.sum() == 16**3

    def test_an_equal_product_computed_again_is_right(self) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x @ w
            total = (y @ y).sum()
            release([y])
            return total + (x @ w).sum()

        weight = ones(requires_grad=True)
        loss = compiled(function)(ones(), weight)
        assert loss == 16**5 + 16**3
        loss.backward()
        assert weight.grad.sum() == 16**2 * (2 * 16**3 + 16)

    def test_what_a_later_operator_reads_is_kept_for_it(self) -> None:
        def function(x: torch.Tensor) -> tuple[int, int]:
            y = x @ x
            return release([y]), release([y])

        assert compiled(function)(ones()) == (0, BYTES)

    def test_freed_memory_is_not_reused_for_another_result(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x @ x
            z = y @ x
            release([y])
            for _ in range(3):
                z = z @ x
            return z

        assert compiled(function)(ones() / 16).sum() == 16


def test_under_a_dispatch_mode_a_release_keeps_what_the_mode_was_handed() -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    x = ones()
    with Watching():
        assert release([x]) == 0
    assert x.sum() == 256
    assert release([x]) == BYTES


def test_tracing_releases_nothing_real() -> None:
    constant = ones()

    def function(x: torch.Tensor) -> torch.Tensor:
        release([x])
        release([torch.tensor([1.0])])
        return x @ x

    for mode in ("real", "fake", "symbolic"):
        x = ones()
        if mode == "real":  # the others refuse a real tensor next to fakes
            make_fx(lambda t: release([constant]), tracing_mode=mode)(x)
        graph = make_fx(function, tracing_mode=mode)(x)
        assert x.sum() == 256 and constant.sum() == 256
        calls = [node.target for node in graph.graph.nodes]
        assert calls.count(release.default) == 2


class TestFakes:
    def test_a_fake_tensor_mode_sees_zero_bytes(self) -> None:
        with FakeTensorMode() as mode:
            x = torch.empty(4)
            assert release([x, None]) == 0
            torch.ops.deepmd.safe_empty_cache(torch.device("cuda"))
            torch.ops.deepmd.sync_ranks("no such group", "phase")
        kept = ones()
        with mode:
            assert release([mode.from_tensor(kept)]) == 0
        assert kept.sum() == 256

    def test_meta_tensors_see_zero_bytes(self) -> None:
        assert release([ones(device="meta")]) == 0

    def test_symbolic_views_and_dynamic_dimensions_are_no_obstacle(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x[1:].reshape(-1)
            release([y, x.t(), None])
            return y

        make_fx(function, tracing_mode="symbolic")(ones())

        class Module(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return function(x)

        rows = torch.export.Dim("rows", min=3)
        program = torch.export.export(Module(), (ones(),), dynamic_shapes=({0: rows},))
        assert program.module()(torch.ones(5, 16)).shape == (64,)

    def test_wrappers_of_functorch_release_nothing(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            assert release([x]) == 0
            assert torch.ops.deepmd.explain_release([x]) != ["release"]
            return x.sum()

        assert torch.func.grad(function)(ones()).sum() == 256
        kept = ones()
        assert torch.vmap(function)(kept).sum() == kept.sum()

    def test_arguments_are_checked_with_the_kernels_words(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            torch.ops.deepmd.sync_ranks("group", "phase", "", -1.0)
            return x

        with pytest.raises(ValueError) as eager:
            function(ones())
        with pytest.raises(ValueError) as traced:
            make_fx(function, tracing_mode="symbolic")(ones())
        assert str(traced.value) == str(eager.value).split("\n")[0]
        with pytest.raises(Exception, match="timeout_s must be a number of seconds"):
            compiled(function)(ones())


OPCHECKED = {
    "empty list": (release.default, ([],)),
    "a tensor and None": (release.default, ([ones(), None],)),
    "a tensor twice": (release.default, ([TWICE := ones(), TWICE],)),
    "overload list": (release.list, ([ones()],)),
    "empty": (torch.ops.deepmd.safe_empty_cache.default, (torch.device("cpu"),)),
}


@pytest.mark.parametrize("case", OPCHECKED)
def test_opcheck_passes_with_ci_set(case: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("CI", "1")
    torch.library.opcheck(*OPCHECKED[case])


def test_memory_of_a_released_input_dies_with_its_last_name() -> None:
    x = ones()
    dead = weakref.ref(x)
    compiled(lambda t: (t @ t, release([t]))[0])(x)
    del x
    assert dead() is None


BARE = """
import torch, deepmd_prewarm
torch.ops.load_library(deepmd_prewarm.library_path())
def release(x): torch.ops.deepmd.release_trace_inputs([torch.ones(3)])
def empty(x): torch.ops.deepmd.safe_empty_cache(torch.device("cpu"))
def meet(x): torch.ops.deepmd.sync_ranks("group", "phase")
def attempt(name, route):
    try:
        route()
    except Exception as error:
        print(name, "import deepmd_prewarm" in str(error))
    else:
        print(name, "went on")
x = torch.ones(4, 4)
for operator in (release, empty, meet):
    def function(x):
        operator(x)
        return x @ x
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)
    if operator is not meet:
        assert function(x).sum() == 64
        torch.jit.script(operator)(x)
    attempt("compile", lambda: torch.compile(function, backend="aot_eager")(x))
    attempt("export", lambda: torch.export.export(Module(), (x,)))
"""


def test_without_the_shims_compilers_say_what_to_import() -> None:
    assert output(BARE).splitlines() == ["compile True", "export True"] * 3
