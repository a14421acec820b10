# SPDX-License-Identifier: LGPL-3.0-or-later
"""Nothing of ours breaks a CUDA graph that is being captured."""

from __future__ import annotations

import pytest
import torch

deepmd_prewarm = pytest.importorskip("deepmd_prewarm")


def test_a_capture_goes_on_whatever_is_called_inside(device):
    task = deepmd_prewarm.CompiledTask.from_callable("task", lambda x: x * 2)
    static = torch.ones(1024, device=device)
    idle = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    del idle
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static * 2
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = static * 2
        loss = result.sum()
        assert deepmd_prewarm.safe_empty_cache(device) == 0
        reasons = deepmd_prewarm.explain_release([static])
        freed = deepmd_prewarm.release_trace_inputs([static])
        with pytest.raises(RuntimeError, match="scalarize_losses: expected no CUDA"):
            deepmd_prewarm.scalarize_losses({"loss": loss})
        with pytest.raises(RuntimeError, match="warmup_compiled: expected no CUDA"):
            torch.ops.deepmd.warmup_compiled(task, [static])
    assert freed == 0
    assert "CUDA graph" in reasons[0], reasons
    static.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert result.eq(6).all().item()
    assert deepmd_prewarm.scalarize_losses({"loss": loss}) == {"loss": 6 * 1024}


def test_after_the_capture_everything_works_again(device):
    static = torch.ones(1024, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static + 1
    del graph
    torch.cuda.synchronize()
    assert deepmd_prewarm.explain_release([static]) == ["release"]
    assert deepmd_prewarm.release_trace_inputs([static]) == 4096
