# SPDX-License-Identifier: LGPL-3.0-or-later
"""safe_empty_cache and cache_bytes where there is no CUDA device.

What they do to an allocator is tested in C++, on a fake one.
"""

from __future__ import annotations

import deepmd_prewarm
import pytest
import torch
from deepmd_prewarm import cache_bytes, safe_empty_cache
from fresh_process import run

deepmd_prewarm.load()
no_driver = pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")

DEVICES = ["cpu", "meta", "cuda", "cuda:0", "cuda:3", "xpu", "mps", "hpu:1"]


@no_driver
@pytest.mark.parametrize("device", DEVICES)
def test_every_device_without_a_cache_is_a_silent_no_op(device):
    for argument in (device, torch.device(device)):
        assert safe_empty_cache(argument) == 0
        assert cache_bytes(argument) == (0, 0)
    assert torch.ops.deepmd.safe_empty_cache(torch.device(device)) is None
    assert tuple(torch.ops.deepmd.cache_bytes(torch.device(device))) == (0, 0)


def test_nothing_initializes_cuda():
    code = f"""
import torch, deepmd_prewarm
for device in {DEVICES!r}:
    deepmd_prewarm.safe_empty_cache(device)
    deepmd_prewarm.cache_bytes(device)
assert not torch.cuda.is_initialized()
print("END")
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (0, "END\n"), done.stderr


@pytest.mark.parametrize("call", [safe_empty_cache, cache_bytes])
def test_a_device_is_a_string_or_a_device(call):
    for wrong in (0, None, 1.0, ["cuda"]):
        words = f"{call.__name__}: expected a device as str or torch.device, got "
        with pytest.raises(TypeError, match=words + type(wrong).__name__):
            call(wrong)
    with pytest.raises(RuntimeError, match="gpu"):
        call("gpu")


def test_tracing_runs_nothing_and_keeps_the_call():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        assert safe_empty_cache("cuda") == 0

    def step(x):
        safe_empty_cache("cuda")
        return x * 2

    graph = make_fx(step)(torch.ones(3))
    assert "safe_empty_cache" in graph.code
    assert torch.equal(graph(torch.ones(3)), torch.full((3,), 2.0))
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_a_script_calls_it_with_a_device_of_its_own():
    @torch.jit.script
    def step(x: torch.Tensor):
        torch.ops.deepmd.safe_empty_cache(x.device)
        return torch.ops.deepmd.cache_bytes(x.device)

    assert step(torch.ones(3)) == (0, 0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_program_keeps_the_call():
    class Step(torch.nn.Module):
        def forward(self, x):
            torch.ops.deepmd.safe_empty_cache(torch.device("cuda"))
            return x * 2

    program = torch.export.export(Step(), (torch.ones(3),))
    assert "safe_empty_cache" in str(program.graph)
    assert torch.equal(program.module()(torch.ones(3)), torch.full((3,), 2.0))
