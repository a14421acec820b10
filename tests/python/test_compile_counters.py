# SPDX-License-Identifier: LGPL-3.0-or-later
"""Every graph is counted once: forward, inference, backward, lazy or not."""

from __future__ import annotations

import logging

import pytest
import torch
from deepmd_prewarm import compile_counters
from deepmd_prewarm.compile_counters import CompileCounts, CompileMeter
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def clean_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(**options):
    weight = torch.randn(4, requires_grad=True)
    return torch.compile(lambda x: (x * weight).sin().sum(), **options)


def test_forward_lazy_backward_and_inference_each_count_once():
    call = compiled(backend="aot_eager", dynamic=False)
    meter = CompileMeter().start()
    loss = call(torch.ones(4))
    assert meter.read() == CompileCounts(forward=1, backward=0)
    loss.backward()
    assert meter.read() == CompileCounts(forward=1, backward=1)
    with torch.no_grad():
        call(torch.ones(4))
    assert meter.read() == CompileCounts(forward=2, backward=1)
    call(torch.ones(4)).backward()
    assert meter.stop() == CompileCounts(forward=2, backward=1)
    assert len(meter.spans) == 3
    assert all(span.end > span.start and not span.loaded for span in meter.spans)


def test_a_backend_without_aotautograd_counts_too():
    call = compiled(backend="eager")
    meter = CompileMeter().start()
    call(torch.ones(4)).backward()
    assert meter.stop().total == 1


def test_nothing_counts_before_start_or_after_stop():
    call = compiled(backend="aot_eager", dynamic=False)
    call(torch.ones(4)).backward()
    before = len(callback_handler.start_callbacks)
    meter = CompileMeter().start()
    assert meter.stop() == CompileCounts()
    assert len(callback_handler.start_callbacks) == before
    call(torch.ones(4, 4)).backward()
    assert meter.spans == []


def test_meters_nest():
    call = compiled(backend="eager")
    outer = CompileMeter().start()
    call(torch.ones(4))
    inner = CompileMeter().start()
    call(torch.ones(2, 4))
    assert inner.stop().forward == 1
    call(torch.ones(3, 2, 4))
    assert outer.stop().forward == 3


def test_a_compile_that_raises_is_a_span_and_no_graph():
    def broken(graph, inputs):
        raise ValueError("no such backend today")

    meter = CompileMeter().start()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        compiled(backend=broken)(torch.ones(4))
    meter.stop()
    assert len(meter.spans) == 1


def test_a_reset_of_dynamo_and_cleared_counters_lose_nothing_afterwards():
    meter = CompileMeter().start()
    call = compiled(backend="aot_eager", dynamic=False)
    call(torch.ones(4)).backward()
    torch._dynamo.reset()  # drops everybody's callbacks
    counters.clear()
    meter.listen()
    call(torch.ones(4)).backward()
    assert meter.stop() == CompileCounts(forward=2, backward=2)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # One training graph of Inductor, compiled; its backward in the forward.
        ({"miss": 2}, CompileCounts(1, 1, 0, 2)),
        ({"hit": 2}, CompileCounts(1, 1, 2, 0)),
        ({"bypass": 2}, CompileCounts(1, 1, 0, 2)),
        ({"hit": 1}, CompileCounts(1, 0, 1, 0)),
        ({}, CompileCounts(1, 0, 0, 0)),
    ],
)
def test_inductor_graphs_beyond_the_forwards_are_backwards(found, expected):
    meter = CompileMeter().start()
    counters["stats"]["unique_graphs"] += 1
    counters["aot_autograd"]["ok"] += 1
    for name, count in found.items():
        counters["inductor"][f"fxgraph_cache_{name}"] += count
    assert meter.stop() == expected


def test_a_span_is_loaded_only_if_every_graph_of_it_came_from_the_cache():
    meter = CompileMeter().start()
    for hits, misses in ((2, 0), (1, 1), (0, 0)):
        with callback_handler.install_callbacks(
            torch._dynamo.callback.CallbackTrigger.DYNAMO, "0/0"
        ):
            counters["inductor"]["fxgraph_cache_hit"] += hits
            counters["inductor"]["fxgraph_cache_miss"] += misses
    meter.stop()
    assert [span.loaded for span in meter.spans] == [True, False, False]


def test_a_name_that_torch_moved_is_told_once_and_makes_the_count_incomplete(
    monkeypatch, caplog
):
    monkeypatch.setattr(compile_counters, "_upstream", None)
    monkeypatch.delattr("torch._dynamo.utils.counters")
    monkeypatch.delattr("torch._dynamo.callback.callback_handler")
    with caplog.at_level(logging.WARNING):
        meter = CompileMeter().start()
        assert not meter.complete
        assert meter.stop() == CompileCounts()
    assert "torch._dynamo.utils.counters" in caplog.text
    assert "torch._dynamo.callback.callback_handler" in caplog.text
    assert len(caplog.records) == 1
    monkeypatch.setattr(compile_counters, "_upstream", None)
    caplog.clear()
