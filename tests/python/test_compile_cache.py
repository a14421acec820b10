# SPDX-License-Identifier: LGPL-3.0-or-later
"""One compile cache, used by processes with and without the shims.

The real kernels run, and torch's profiler counts them: a kernel that counts
would hide that the real one refuses to run while a graph is traced without the
shims.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_process import output
from library_copies import LIBRARY, OTHER_VERSION, make_copies

FUNCTION = """
import torch, torch._inductor.config
# Else six subprocesses that import torch, to ask for CPU features.
torch._inductor.config.cpp.vec_isa_ok = True
def program(x):
    y = x @ x
    torch.ops.deepmd.release_trace_inputs([x])
    torch.ops.deepmd.safe_empty_cache(torch.device("cpu"))
    return y @ y
"""
PROGRAM = f"""
{FUNCTION}
compiled = torch.compile(program)
def step():
    x = torch.ones(4, 4) / 4
    with torch.autograd.profiler.profile() as profile:
        result = compiled(x)
    assert torch.equal(result, torch.ones(4, 4) / 4)
    try:
        x.sum()
    except RuntimeError as error:
        assert "release_trace_inputs" in str(error)
    else:
        raise AssertionError("x is alive: a call was dropped")
    return sorted(e.name for e in profile.function_events if "deepmd::" in e.name)
try:
    step()
except Exception as error:
    assert "import deepmd_prewarm" in str(error), error
    print("refused")
else:
    assert step() == ["deepmd::release_trace_inputs", "deepmd::safe_empty_cache"]
    counters = torch._dynamo.utils.counters["inductor"]
    print("ran, cache", "hit" if counters["fxgraph_cache_hit"] else "miss")
"""
# Two processes that compile from nothing, 35 s.
LONG = pytest.mark.faults
WITH = "import deepmd_prewarm; deepmd_prewarm.load()\n" + PROGRAM
WITHOUT = f"import torch; torch.ops.load_library({str(LIBRARY)!r})\n" + PROGRAM
# As a process that has the library and fakes of its own, or an old plugin.
NO_EFFECTS = f"""
import torch
torch.library._register_effectful_op = lambda *operator: None
torch.fx.node.has_side_effect = lambda operator: operator
import deepmd_prewarm
deepmd_prewarm.load()
torch.compiler.config.cache_key_tag = ""
{FUNCTION}
torch.compile(program)(torch.ones(4, 4) / 4)
print("filled")
"""
BEFORE_UPDATE = f"""
from deepmd_prewarm import _library
_library.package_version = lambda: {OTHER_VERSION!r}
{WITH}
assert torch.ops.deepmd.prewarm_library()[0] == {OTHER_VERSION!r}
"""


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        pytest.param(*(WITH, WITH, ["ran, cache miss", "ran, cache hit"]), marks=LONG),
        pytest.param(*(WITHOUT, WITH, ["refused", "ran, cache miss"]), marks=LONG),
        (WITH, WITHOUT, ["ran, cache miss", "refused"]),
        (NO_EFFECTS, WITH, ["filled", "ran, cache miss"]),
    ],
    ids=["with, with", "without, with", "with, without", "without effects, with"],
)
def test_a_cache_that_another_process_filled_drops_no_call(
    first: str, second: str, told: list[str], tmp_path: Path
) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": tmp_path}
    assert [output(code, **cache) for code in (first, second)] == told


@pytest.mark.parametrize(
    "order", ["older first", pytest.param("newer first", marks=LONG)]
)
def test_a_cache_from_before_or_after_an_update_of_the_plugin_drops_no_call(
    order: str, tmp_path: Path
) -> None:
    other = make_copies(tmp_path)["other"]
    cache = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    older = lambda: output(BEFORE_UPDATE, DP_PREWARM_LIBRARY=other, **cache)  # noqa: E731
    newer = lambda: output(WITH, **cache)  # noqa: E731
    steps = [older, newer] if order == "older first" else [newer, older]
    assert [step() for step in steps] == ["ran, cache miss", "ran, cache hit"]
