# SPDX-License-Identifier: LGPL-3.0-or-later
"""release_trace_inputs and explain_release, typed and bare."""

from __future__ import annotations

import pytest
import torch

from deepmd_prewarm import explain_release, release_trace_inputs


def test_releasing_gives_back_the_bytes_of_every_tensor_once():
    coord, atype = torch.rand(4, 3, dtype=torch.float64), torch.zeros(4).long()
    inputs = [coord, atype, None, coord]
    assert explain_release(inputs)[:2] == ["release", "release"]
    assert release_trace_inputs(inputs) == 4 * 3 * 8 + 4 * 8
    assert release_trace_inputs(inputs) == 0
    assert explain_release(inputs)[0] == "already released"


def test_reading_a_released_tensor_raises_by_name():
    coord = torch.rand(4, 3)
    release_trace_inputs([coord])
    with pytest.raises(RuntimeError, match="release_trace_inputs"):
        coord.sum()
    with pytest.raises(RuntimeError, match="release_trace_inputs"):
        coord[0].sum()
    assert (coord.shape, coord.dtype) == (torch.Size([4, 3]), torch.float32)


def test_an_input_that_autograd_saved_is_kept_and_the_backward_is_right():
    coord, weight = torch.rand(5), torch.rand(5, requires_grad=True)
    energy = (coord * weight).sum()
    assert release_trace_inputs([coord]) == 0
    energy.backward()
    assert torch.equal(weight.grad, coord)
