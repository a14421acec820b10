# SPDX-License-Identifier: LGPL-3.0-or-later
"""The typed release protects what only Python can see."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from deepmd_prewarm import explain_release, release_trace_inputs
from torch.fx.experimental.proxy_tensor import make_fx


def test_variables_of_the_caller_and_the_list_are_given_up():
    coord = torch.rand(4)
    again = coord
    inputs = [coord, again, None]
    assert explain_release(inputs)[0] == "release"
    assert release_trace_inputs(inputs) == 16


def test_a_tuple_and_a_generator_are_lists_too():
    assert release_trace_inputs((torch.rand(4), None)) == 16
    assert release_trace_inputs(torch.rand(4) for _ in range(2)) == 32


def test_a_parameter_and_a_buffer_are_protected():
    layer = torch.nn.Linear(3, 3)
    table = torch.ones(4)
    layer.register_buffer("table", table)
    assert explain_release([layer.weight, table]) == [
        "a Parameter: modules and optimizers own it",
        "held in Python by a dict",
    ]
    assert release_trace_inputs([layer.weight, table]) == 0
    assert layer.table.sum() == 4


def test_a_constant_of_a_traced_graph_is_protected():
    constant = torch.ones(4)
    graph = make_fx(lambda x: x + constant)(torch.rand(4))
    assert release_trace_inputs([constant]) == 0
    assert torch.equal(graph(torch.zeros(4)), torch.ones(4))


@pytest.mark.parametrize("inner", ["hook", "lambda", "default"])
def test_what_a_function_still_uses_is_protected(inner):
    coord = torch.ones(4)
    weight = torch.zeros(4, requires_grad=True)
    if inner == "hook":
        handle = weight.register_hook(lambda grad: grad * coord)
    elif inner == "lambda":
        handle = lambda: coord.sum()  # noqa: E731
    else:
        handle = lambda x=coord: x.sum()  # noqa: E731
    assert release_trace_inputs([coord]) == 0
    assert explain_release([coord])[0].startswith("held in Python by a")
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [2.0] * 4
    if inner == "hook":
        handle.remove()
        gc.collect()
    del handle
    assert release_trace_inputs([coord]) == 16


def test_a_variable_that_a_dead_inner_function_used_is_given_up():
    coord = torch.rand(4)
    assert [coord[i] for i in range(2)]  # a cell before Python 3.12
    function = lambda: coord  # noqa: E731
    del function
    assert release_trace_inputs([coord]) == 16


def test_the_variable_of_an_enclosing_function_is_protected():
    coord = torch.ones(4)

    def inner():
        return release_trace_inputs([coord])

    assert inner() == 0
    assert coord.sum() == 4


def test_the_variable_of_a_frame_further_up_is_protected():
    def helper(inputs):
        return release_trace_inputs(inputs)

    coord = torch.ones(4)
    assert helper([coord]) == 0
    assert release_trace_inputs([coord], frame=sys._getframe()) == 16


def test_a_module_level_name_is_protected_from_a_function():
    globals()["_coord"] = torch.ones(4)
    try:
        assert release_trace_inputs([_coord]) == 0  # noqa: F821
        assert _coord.sum() == 4  # noqa: F821
    finally:
        del globals()["_coord"]


@pytest.mark.parametrize("holder", ["list", "dict", "tuple", "set", "attribute"])
def test_another_container_protects_its_tensors(holder):
    class Batch:
        __slots__ = ("coord",)

    coord = torch.ones(4)
    batch = Batch()
    batch.coord = coord if holder == "attribute" else None
    others = {
        "list": [coord],
        "dict": {"coord": coord},
        "tuple": (coord,),
        "set": {coord},
        "attribute": batch,
    }
    keep = others.pop(holder)
    del others, batch
    words = explain_release([coord])[0]
    assert (
        words
        == f"held in Python by {'an object of' if holder == 'attribute' else 'a'}"
        + (
            f" {holder}"
            if holder != "attribute"
            else f" {__name__}.{Batch.__qualname__}"
        )
    )
    assert release_trace_inputs([coord]) == 0
    assert coord.sum() == 4
    del keep
    assert release_trace_inputs([coord]) == 16


def test_a_protected_view_protects_its_base_in_the_list():
    base = torch.ones(4)
    keep = [base[1:]]
    assert release_trace_inputs([base, keep[0]]) == 0
    assert keep[0].sum() == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_will_recompute_from_is_protected(reentrant):
    coord, weight = torch.ones(5), torch.ones(5, requires_grad=True)
    energy = torch.utils.checkpoint.checkpoint(
        lambda a, w: (a * w).sin().sum(), coord, weight, use_reentrant=reentrant
    )
    assert release_trace_inputs([coord]) == 0
    energy.backward()
    assert torch.allclose(weight.grad, torch.ones(5).cos())


def test_what_a_pack_hook_kept_is_protected():
    coord, weight = torch.ones(5), torch.ones(5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        energy = (coord * weight).sum()
    assert release_trace_inputs([coord]) == 0
    energy.backward()
    assert torch.equal(weight.grad, coord)


def test_what_a_custom_function_kept_as_an_attribute_is_protected():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return x * scale

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.scale, None

    coord, scale = torch.ones(5, requires_grad=True), torch.full((5,), 3.0)
    energy = Scale.apply(coord, scale).sum()
    assert release_trace_inputs([scale]) == 0
    energy.backward()
    assert coord.grad.tolist() == [3] * 5


def test_a_tensor_in_another_thread_is_protected():
    import threading

    coord = torch.ones(4)
    ready, done = threading.Event(), threading.Event()
    sums = []

    def reader(mine):
        ready.set()
        done.wait(60)
        sums.append(mine.sum().item())

    thread = threading.Thread(target=reader, args=(coord,))
    thread.start()
    ready.wait(60)
    try:
        assert release_trace_inputs([coord]) == 0
    finally:
        done.set()
        thread.join()
    assert sums == [4]


def test_weak_references_do_not_protect():
    coord = torch.rand(4)
    weak = weakref.ref(coord)
    assert release_trace_inputs([coord]) == 16
    assert weak() is coord


def test_the_look_keeps_nothing_alive_by_itself():
    keep = [torch.ones(4)]
    coord = keep[0]
    weak = weakref.ref(coord)
    assert release_trace_inputs([coord]) == 0
    del coord, keep
    assert weak() is None


def test_a_users_own_snapshot_of_the_variables_stays_whole():
    coord = torch.ones(4)
    snapshot = locals()
    assert release_trace_inputs([coord]) == 0  # the snapshot holds it
    assert snapshot["coord"].sum() == 4


def test_the_look_can_be_switched_off():
    keep = [torch.rand(4)]
    assert release_trace_inputs(keep[:]) == 0
    assert explain_release(keep[:], look_for_holders=False) == ["release"]
    assert release_trace_inputs(keep[:], look_for_holders=False) == 16


def test_a_kind_that_is_kept_anyway_keeps_its_own_reason():
    sparse = torch.eye(3).to_sparse()
    keep = [sparse]
    assert explain_release(keep[:])[0].startswith("sparse tensor")


def test_the_look_walks_the_heap_only_where_it_has_to(monkeypatch):
    calls = []
    walk = gc.get_referrers
    monkeypatch.setattr(
        "deepmd_prewarm._holders.gc.get_referrers",
        lambda *objects: calls.append(objects) or walk(*objects),
    )
    plain, shared = torch.ones(4), torch.ones(4)
    keep = [shared]
    assert release_trace_inputs([plain, shared]) == 16
    assert not calls
    assert explain_release([shared])[0] == "held in Python by a list"
    assert len(calls) == 1
    del keep
    calls.clear()
    first, second = torch.ones(4), torch.ones(4)
    inner = lambda: first + second  # noqa: E731
    del inner
    assert release_trace_inputs([first, second]) == 32
    assert len(calls) == 1  # one pass for both
