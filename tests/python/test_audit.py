# SPDX-License-Identifier: LGPL-3.0-or-later
"""audit() finds what was made inside, is still alive, and who holds it."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from deepmd_prewarm import audit
from torch.fx.experimental.proxy_tensor import make_fx

_kept: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    _kept.clear()


def holders(found, kind: str = "tensor") -> dict[str, int]:
    return {one.holder: one.count for one in found.held if one.kind == kind}


def test_what_dies_inside_is_not_told() -> None:
    with audit() as found:
        for _ in range(3):
            torch.ones(1000).square()
    assert found.held == []
    assert found.count() == 0
    assert found.nbytes() == 0


def test_bytes_are_those_of_storages_and_each_is_counted_once() -> None:
    old = torch.ones(100)
    with audit() as found:
        whole = torch.ones(1000)
        _kept.extend([whole, whole[:10], old[:5]])
        del whole
    assert found.count("tensor") == 3
    assert found.nbytes() == 4000  # a view of an old storage costs nothing
    assert found.nbytes("cpu") == 4000
    assert found.nbytes("cuda:0") == 0


def test_holders_are_named() -> None:
    class Cache:
        pass

    cache = Cache()
    model = torch.nn.Linear(1, 1)
    with audit() as found:
        _kept.append(torch.ones(1))
        cache.table = {"sizes": [torch.ones(2)]}
        model.register_buffer("mean", torch.ones(3))
        inside = torch.ones(4)

        def closure() -> torch.Tensor:
            return inside

    told = holders(found)
    assert told["global test_audit._kept"] == 1
    assert told["attribute Cache.table"] == 1
    assert told["module Linear.mean"] == 1
    assert any(holder.startswith("closure") for holder in told), told
    assert closure() is inside


def test_graphs_and_their_metadata_are_found() -> None:
    with audit() as found:
        traced = make_fx(torch.sin, tracing_mode="symbolic")(torch.ones(3))
    assert found.count("graph") == 1
    assert found.count("shape environment") == 1
    assert holders(found, "fake tensor")["graph metadata: val"] >= 2
    assert found.nbytes() == 0  # fake tensors have no memory
    del traced


def test_what_only_a_cycle_kept_is_told_apart() -> None:
    with audit() as found:
        loop: list = [torch.ones(10)]
        loop.append(loop)
        del loop
    assert found.collected
    assert found.in_cycles == {"tensor": 1}
    assert found.count() == 0


def test_a_disabled_garbage_collector_stays_out_of_it() -> None:
    gc.disable()
    try:
        with audit() as found:
            loop: list = [torch.ones(10)]
            loop.append(loop)
            del loop
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.collect()
    assert not found.collected
    assert found.count("tensor") == 1
    assert found.nbytes() == 40


def test_it_tells_also_when_the_block_raises() -> None:
    with pytest.raises(KeyError), audit() as found:
        _kept.append(torch.ones(5))
        raise KeyError
    assert found.nbytes() == 20


def test_table_and_json_hold_the_same(tmp_path: Path) -> None:
    with audit() as found:
        _kept.append(torch.ones(5))
    found.save(tmp_path / "audit.json")
    (one,) = json.loads((tmp_path / "audit.json").read_text())["held"]
    assert one == {
        "kind": "tensor",
        "holder": "global test_audit._kept",
        "device": "cpu",
        "count": 1,
        "nbytes": 20,
    }
    table = found.table()
    assert table.row_count == 1
    assert list(table.columns[1].cells) == ["global test_audit._kept"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    ],
)
def test_unusual_tensors_do_no_harm(make) -> None:
    with audit() as found:
        _kept.append(make())
    assert found.count() >= 1
