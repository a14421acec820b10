# SPDX-License-Identifier: LGPL-3.0-or-later
"""What release refuses although it could free: README's table, row by row.

Each refusal is on the safe side of something that cannot be told apart; the
second half of each test shows what to write instead.
"""

from __future__ import annotations

import sys
from typing import Any

import deepmd_prewarm
import pytest
import torch
from deepmd_prewarm import explain_release, release_trace_inputs
from torch.utils._python_dispatch import TorchDispatchMode

deepmd_prewarm.load()
bare = torch.ops.deepmd.release_trace_inputs


@torch.jit.script
def asks_for_the_size_afterwards(n: int):
    x = torch.ones(n)
    freed: int = torch.ops.deepmd.release_trace_inputs([x])
    return freed, x.size(0)


@torch.jit.script
def in_a_branch(n: int, go: bool) -> int:
    x = torch.ones(n)
    freed = 0
    if go:
        freed = torch.ops.deepmd.release_trace_inputs([x])
    return freed


@torch.jit.script
def in_a_loop(n: int) -> int:
    x = torch.ones(n)
    freed = 0
    for _ in range(n):  # unrolled if the number is known
        freed += torch.ops.deepmd.release_trace_inputs([x])
    return freed


@torch.jit.script
def at_its_last_use(n: int):
    x = torch.ones(n)
    size = x.size(0)
    freed: int = torch.ops.deepmd.release_trace_inputs([x])
    return freed, size


@pytest.mark.parametrize("call", range(3))  # profiled, then optimized
def test_torchscript_releases_only_at_the_last_use_outside_of_blocks(call):
    assert asks_for_the_size_afterwards(4) == (0, 4)
    assert in_a_branch(4, True) == 0
    assert in_a_loop(4) == 0
    assert at_its_last_use(4) == (16, 4)


def test_a_users_dispatch_mode_is_handed_the_inputs_too():
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    coord = torch.rand(4)
    with Watching():
        assert bare([coord]) == 0
    assert bare([coord]) == 16


def test_a_pair_of_a_real_tensor_and_its_complex_view_stays():
    real = torch.rand(4, 2)
    assert bare([real, torch.view_as_complex(real)]) == 0
    assert bare([torch.rand(4, dtype=torch.cfloat)]) == 32


def test_memory_that_numpy_once_saw_stays():
    coord = torch.rand(4)
    coord.numpy()  # dropped at once
    assert explain_release([coord])[0].startswith("borrowed or shared memory")
    assert release_trace_inputs([coord]) == 0
    copied = torch.rand(4)
    copied.clone().numpy()
    assert release_trace_inputs([copied]) == 16


def test_a_leaf_waits_until_its_spent_graph_is_dropped():
    coord = torch.rand(4, requires_grad=True)
    energy = coord.sum()
    energy.backward()
    assert release_trace_inputs([coord]) == 0
    del energy
    assert release_trace_inputs([coord]) == 16


def test_inside_a_functorch_transform_everything_stays():
    def energy(coord: torch.Tensor) -> torch.Tensor:
        scratch = torch.rand(4)
        assert bare([coord, scratch]) == 0
        return coord.sum()

    torch.func.grad(energy)(torch.ones(4))
    assert bare([torch.ones(4)]) == 16


def test_the_typed_wrapper_keeps_what_a_helpers_caller_still_names():
    def helper(inputs: list[torch.Tensor], **options: Any) -> int:
        return release_trace_inputs(inputs, **options)

    coord = torch.rand(4)
    assert helper([coord]) == 0
    assert helper([coord], frame=sys._getframe()) == 16
    other = torch.rand(4)
    assert helper([other], look_for_holders=False) == 16


# "Two lists": KeepsATensorThatAnotherListHolds, "C++: some moved into the list":
# TrustsNoHandleBesideAListThatOwnsItsTensors, both in tests/cpp.
