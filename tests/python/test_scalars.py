# SPDX-License-Identifier: LGPL-3.0-or-later
"""scalarize_losses, bare and typed."""

from __future__ import annotations

import math
import weakref

import deepmd_prewarm
import numpy as np
import pytest
import torch
from deepmd_prewarm import scalarize_losses
from torch.utils._python_dispatch import TorchDispatchMode

deepmd_prewarm.load()


@pytest.fixture(params=["bare", "typed"])
def scalarize(request):
    """Both routes; they agree on a plain dict of tensors."""
    bare = torch.ops.deepmd.scalarize_losses
    return bare if request.param == "bare" else scalarize_losses


def test_floats_come_back_under_their_keys_in_order(scalarize):
    losses = {f"rmse_{i}": torch.tensor(i / 8) for i in (3, 1, 2, 0)}
    scalars = scalarize(losses)
    assert list(scalars.items()) == [(f"rmse_{i}", i / 8) for i in (3, 1, 2, 0)]
    assert {type(value) for value in scalars.values()} == {float}


def test_keys_with_a_prefix_are_left_out(scalarize):
    losses = {key: torch.ones(()) for key in ("l2_ener", "rmse", "rmse_l2_", "l2")}
    assert list(scalarize(losses)) == ["rmse", "rmse_l2_", "l2"]
    assert list(scalarize(losses, ["rmse"])) == ["l2_ener", "l2"]
    assert list(scalarize(losses, [])) == list(losses)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "half",
        "bfloat16",
        "float32",
        "float64",
    ],
)
def test_every_real_dtype_and_shape_of_one_element_is_read(scalarize, dtype, shape):
    assert scalarize({"loss": torch.ones(shape).to(getattr(torch, dtype))}) == {
        "loss": 1.0
    }


def test_large_integers_are_rounded_as_python_rounds_them(scalarize):
    integers = [2**53 + 1, 2**53 + 3, -(2**53) - 3, 2**63 - 1, -(2**63)]
    losses = {str(i): torch.tensor(i) for i in integers}
    losses["unsigned"] = torch.tensor(2**64 - 1, dtype=torch.uint64)
    assert list(scalarize(losses).values()) == [float(i) for i in integers] + [2.0**64]


def test_half_values_are_exact(scalarize):
    third = torch.tensor(1 / 3)
    for dtype in (torch.half, torch.bfloat16, torch.float32):
        value = third.to(dtype)
        assert scalarize({"loss": value})["loss"] == value.item()


def test_nan_and_infinity_pass(scalarize):
    scalars = scalarize({k: torch.tensor(float(k)) for k in ("nan", "inf", "-inf")})
    assert math.isnan(scalars["nan"])
    assert (scalars["inf"], scalars["-inf"]) == (math.inf, -math.inf)


def test_no_graph_is_held_or_made(scalarize):
    weight, factor = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    losses = {"loss": (weight * factor).sum()}
    saved = weakref.ref(factor)  # by the graph
    del factor
    assert scalarize(losses) == {"loss": 6.0}
    assert saved() is not None
    del losses
    assert saved() is None


def test_two_hundred_keys_keep_their_order(scalarize):
    losses = {f"k{i}": torch.tensor(i, dtype=torch.int32) for i in range(200)}
    assert list(scalarize(losses).items()) == [(f"k{i}", float(i)) for i in range(200)]
    assert scalarize({}) == {}


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (torch.ones(2), ValueError, "one element for key 'e', got a tensor of shape"),
        (torch.ones(0), ValueError, "one element for key 'e'"),
        (torch.tensor(1j), TypeError, "real dtype for key 'e', got ComplexFloat"),
        (torch.ones(1).to_sparse(), TypeError, "dense tensor for key 'e'"),
    ],
)
def test_what_cannot_be_a_scalar_is_refused_by_its_key(scalarize, value, error, words):
    with pytest.raises(error, match=words):
        scalarize({"good": torch.ones(()), "e": value})
    assert scalarize({"l2_e": value}) == {}


def test_reading_costs_no_transfer_call_for_each_key(scalarize):
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    losses = {f"k{i}": torch.tensor(float(i)) for i in range(20)}
    with Count():
        assert len(scalarize(losses)) == 20
    assert not [call for call in calls if "_local_scalar_dense" in call]
    assert len(calls) <= 1


def test_a_released_loss_is_named():
    loss = torch.ones(1)
    torch.ops.deepmd.release_trace_inputs([loss])
    with pytest.raises(RuntimeError, match="release_trace_inputs"):
        scalarize_losses({"loss": loss})


# -- what only the typed wrapper takes ------------------------------------------


def test_numbers_none_and_nested_mappings_are_taken():
    losses = {
        "e": torch.tensor(1.5, requires_grad=True),
        "l2_e": 3,
        "steps": 2**53 + 1,
        "flag": True,
        "lr": 1e-3,
        "none": None,
        "numpy": np.float32(0.5),
        "array": np.array(4),
        "task": {"f": torch.tensor([2]), "l2_f": "left out", "deep": {"v": 1}},
    }
    scalars = scalarize_losses(losses)
    assert math.isnan(scalars.pop("none"))
    assert scalars == {
        "e": 1.5,
        "steps": 2.0**53,
        "flag": 1.0,
        "lr": 1e-3,
        "numpy": 0.5,
        "array": 4.0,
        "task": {"f": 2.0, "deep": {"v": 1.0}},
    }
    assert list(losses)[-1] == "task" and isinstance(losses["steps"], int)


def test_nested_keys_that_read_alike_stay_apart():
    losses = {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}, "c": None}
    scalars = scalarize_losses(losses)
    assert (scalars["a.b"], scalars["a"]) == (1.0, {"b": 2.0})


def test_a_nested_loss_is_refused_by_its_path():
    with pytest.raises(ValueError, match=r"key 'water\.f'"):
        scalarize_losses({"water": {"f": torch.ones(2)}})


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ({"e": "1.0"}, "for key 'e', got str"),
        ({"e": 1j}, "for key 'e', got complex"),
        ({"t": {"e": [1.0]}}, r"for key 't\.e', got list"),
        ({1: 1.0}, "string keys, got 1"),
        ({1: torch.ones(())}, "string keys, got 1"),
    ],
)
def test_values_and_keys_of_other_types_are_named(losses, words):
    with pytest.raises(TypeError, match=words):
        scalarize_losses(losses)


def test_parameters_and_other_mappings_are_taken():
    from collections import OrderedDict
    from types import MappingProxyType

    parameter = torch.nn.Parameter(torch.ones(1))
    assert scalarize_losses(OrderedDict(p=parameter)) == {"p": 1.0}
    assert scalarize_losses(MappingProxyType({"p": parameter})) == {"p": 1.0}


def test_a_key_that_is_no_utf8_is_an_error_not_a_crash():
    with pytest.raises(UnicodeEncodeError):
        scalarize_losses({"\udc80": torch.ones(())})


def test_the_operator_works_in_torchscript():
    @torch.jit.script
    def log(loss: torch.Tensor):
        return torch.ops.deepmd.scalarize_losses({"e": loss, "l2_e": loss})

    assert log(torch.tensor(2.0)) == {"e": 2.0}
