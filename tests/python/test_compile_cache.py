# SPDX-License-Identifier: LGPL-3.0-or-later
"""One compile cache, used by processes with and without the shims.

Seen by what a call does, not by counting it: a kernel that counts would hide
that the real one refuses to run while a graph is traced without the shims.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_process import output
from library_copies import LIBRARY, OTHER_VERSION, make_copies

PROGRAM = """
import torch, torch._inductor.config
torch._inductor.config.cpp.vec_isa_ok = True
def program(x):
    y = x @ x
    torch.ops.deepmd.release_trace_inputs([x])
    torch.ops.deepmd.safe_empty_cache(torch.device("cpu"))
    return y @ y
x = torch.ones(4, 4) / 4
try:
    result = torch.compile(program)(x)
except Exception as error:
    assert "import deepmd_prewarm" in str(error), error
    assert x.sum() == 4  # nothing ran
    print("refused")
else:
    assert torch.equal(result, torch.ones(4, 4) / 4)
    try:
        x.sum()
        print("dropped")
    except RuntimeError as error:
        assert "release_trace_inputs" in str(error)
        counters = torch._dynamo.utils.counters["inductor"]
        print("released", "hit" if counters["fxgraph_cache_hit"] else "miss")
"""
WITH = "import deepmd_prewarm; deepmd_prewarm.load()\n" + PROGRAM
WITHOUT = f"import torch; torch.ops.load_library({str(LIBRARY)!r})\n" + PROGRAM
BEFORE_UPDATE = f"""
from deepmd_prewarm import _library
_library.package_version = lambda: {OTHER_VERSION!r}
{WITH}
assert torch.ops.deepmd.prewarm_library()[0] == {OTHER_VERSION!r}
"""


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (WITH, WITH, ["released miss", "released hit"]),
        (WITHOUT, WITH, ["refused", "released miss"]),
        (WITH, WITHOUT, ["released miss", "refused"]),
    ],
    ids=["with, with", "without, with", "with, without"],
)
def test_a_cache_that_another_process_filled_drops_no_call(
    first: str, second: str, told: list[str], tmp_path: Path
) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": tmp_path}
    assert [output(code, **cache) for code in (first, second)] == told


def test_a_cache_from_before_an_update_of_the_plugin_drops_no_call(
    tmp_path: Path,
) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    other = make_copies(tmp_path)["other"]
    told = output(BEFORE_UPDATE, DP_PREWARM_LIBRARY=other, **cache)
    assert told == "released miss"
    assert output(WITH, **cache) == "released hit"
