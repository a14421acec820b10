# SPDX-License-Identifier: LGPL-3.0-or-later
"""Allocator, streams, page-locked memory, on the device itself."""

from __future__ import annotations

import pytest
import torch
from conftest import run_apart

deepmd_prewarm = pytest.importorskip("deepmd_prewarm")
MB = 1 << 20


def bridge():
    from deepmd_prewarm import _library

    return _library.bridge()


def test_nothing_makes_a_context_before_the_training_does():
    code = """
import torch, deepmd_prewarm
from deepmd_prewarm._library import bridge
from deepmd_prewarm.doctor import _device
deepmd_prewarm.load()
assert _device().good, _device().text
for device in ("cuda", "cuda:0", "cuda:7"):
    deepmd_prewarm.safe_empty_cache(device)
    assert deepmd_prewarm.cache_bytes(device) == (0, 0)
deepmd_prewarm.release_trace_inputs([torch.ones(3)])
task = deepmd_prewarm.CompiledTask.from_callable("cpu", lambda x: x * 2)
deepmd_prewarm.warmup_compiled(task, [torch.ones(3)])
assert not torch.cuda.is_initialized()
assert bridge().device_extension()[0] == "loaded", bridge().device_extension()
assert bridge().device_contexts() == []
torch.ones(1, device="cuda")
print(bridge().device_contexts())
"""
    assert run_apart(code) == "[0]"


def test_free_blocks_go_back_to_the_driver(device, note):
    kept = torch.ones(MB, device=device)
    block = torch.empty(256 * MB, dtype=torch.uint8, device=device)
    del block
    reserved, used = deepmd_prewarm.cache_bytes(device)
    assert reserved == torch.cuda.memory_reserved(device)
    assert used == torch.cuda.memory_allocated(device)
    freed = deepmd_prewarm.safe_empty_cache(device)
    assert freed >= 256 * MB
    assert torch.cuda.memory_reserved(device) == reserved - freed
    assert kept.sum().item() == MB
    note(freed_MB=freed // MB)


def test_a_released_tensor_is_freed_and_says_so_when_read(device):
    inputs = torch.ones(16 * MB, device=device)
    nbytes = inputs.numel() * 4
    before = torch.cuda.memory_allocated(device)
    assert deepmd_prewarm.release_trace_inputs([inputs]) == nbytes
    assert before - torch.cuda.memory_allocated(device) == nbytes
    with pytest.raises(RuntimeError, match="release_trace_inputs"):
        inputs + 1


def test_what_a_view_or_a_backward_needs_is_kept(device):
    inputs = torch.ones(1024, device=device)
    view = inputs[:10]
    assert deepmd_prewarm.release_trace_inputs([inputs]) == 0
    leaf = torch.ones(8, device=device)
    weight = torch.full((8,), 3.0, device=device, requires_grad=True)
    loss = (leaf * weight).sum()
    assert deepmd_prewarm.release_trace_inputs([leaf]) == 0
    loss.backward()
    assert weight.grad.sum().item() == 8
    assert view.sum().item() == 10


def busy(stream: torch.cuda.Stream) -> None:
    """Keep a stream busy for about a tenth of a second."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)


@pytest.mark.parametrize("told", ["by us", "by record_stream"])
def test_memory_in_use_on_another_stream_is_not_handed_on(told, device, note):
    side = torch.cuda.Stream()
    count = 4 * MB
    inputs = torch.ones(count, device=device)
    address = inputs.data_ptr()
    torch.cuda.synchronize()
    busy(side)
    with torch.cuda.stream(side):
        total = inputs.sum()  # when the side stream comes to it
        if told == "by us":
            freed = deepmd_prewarm.release_trace_inputs([inputs])
    if told == "by record_stream":
        inputs.record_stream(side)
        freed = deepmd_prewarm.release_trace_inputs([inputs])
    assert freed == 4 * count
    next_one = torch.full((count,), 2.0, device=device)  # on the default stream
    reused = next_one.data_ptr() == address
    torch.cuda.synchronize()
    assert total.item() == count
    note(block_reused_early=reused)


def test_page_locked_memory_goes_back_too(device, note):
    kept = torch.ones(16, device=device)
    block = torch.empty(64 * MB, dtype=torch.uint8, pin_memory=True)
    del block
    before = bridge().pinned_bytes("cuda")
    assert before >= 64 * MB
    deepmd_prewarm.safe_empty_cache(device)
    assert before - bridge().pinned_bytes("cuda") >= 64 * MB
    assert kept.sum().item() == 16
    note(unlocked_MB=before // MB)


def test_losses_of_a_device_are_read_in_one_transfer(device, note):
    from torch.profiler import ProfilerActivity, profile

    losses = {
        f"loss{i}": torch.tensor(i + 0.1, dtype=torch.float64, device=device)
        for i in range(20)
    }
    losses["count"] = torch.tensor(2**53 + 3, device=device)
    deepmd_prewarm.scalarize_losses(losses)  # the first locks its page
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        values = deepmd_prewarm.scalarize_losses(losses)
    assert values == {
        **{f"loss{i}": i + 0.1 for i in range(20)},
        "count": 9007199254740996.0,
    }
    names = [event.name for event in seen.events()]
    assert "aten::_local_scalar_dense" not in names
    copies = [name for name in names if "Memcpy DtoH" in name]
    if copies:  # where CUPTI may look at the device
        assert len(copies) == 1, copies
        assert "Pinned" in copies[0], copies
    note(copies=copies or "not visible")
