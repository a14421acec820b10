# SPDX-License-Identifier: LGPL-3.0-or-later
"""A warm-up through DistributedDataParallel: no hook, no collective, no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepmd_prewarm import CompiledTask, warmup_compiled
from torch.nn.parallel import DistributedDataParallel as DDP


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


X = torch.arange(15.0).reshape(5, 3)


def counting_hook(buckets: list[int]) -> Any:
    """A comm hook that notes each bucket and sends nothing."""

    def hook(state: None, bucket: dist.GradBucket) -> Any:
        buckets.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # DDP compares the annotations themselves, not their text.
    hook.__annotations__ = {
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    return hook


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_real_step_after_a_warm_up_is_that_of_a_run_without(
    options: dict[str, bool], compiled: bool
) -> None:
    grads: list[list[torch.Tensor]] = []
    for warm in (False, True):
        net, buckets = Net(), list[int]()
        ddp = DDP(net, **options)
        ddp.register_comm_hook(None, counting_hook(buckets))
        call: Any = torch.compile(ddp, backend="aot_eager") if compiled else ddp
        if warm:
            fired: list[torch.Tensor] = []
            net.linear.weight.register_post_accumulate_grad_hook(fired.append)
            flags = dict(vars(ddp))

            def step(x: torch.Tensor, call: Any = call) -> torch.Tensor:
                return call(x).square().sum()

            task = CompiledTask.from_callable("t", step)
            warmup_compiled(task, [X])
            warmup_compiled(task, [X])
            assert task.stats()["covers_training"] == 1
            assert not buckets
            assert not fired
            assert all(parameter.grad is None for parameter in net.parameters())
            for name in ("require_forward_param_sync", "require_backward_grad_sync"):
                assert vars(ddp)[name] == flags[name]
        for _ in range(2):
            call(X).square().sum().backward()
        assert len(buckets) >= 2
        grads.append([parameter.grad for parameter in net.parameters()])
    for without, after in zip(*grads, strict=True):
        assert torch.equal(without, after)
    torch._dynamo.reset()


def test_no_collective_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = DDP(Net())  # has buffers, which a forward would broadcast
    assert ddp.require_forward_param_sync

    def collective(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective in a warm-up")

    monkeypatch.setattr(ddp, "_sync_buffers", collective)
    for name in ("all_reduce", "broadcast", "barrier", "all_gather"):
        monkeypatch.setattr(dist, name, collective)
    warmup_compiled(CompiledTask.from_callable("t", ddp), [X])
    assert ddp.require_forward_param_sync


def test_wrapping_after_the_warm_up_and_validating_compile_nothing() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    net = Net()
    compiled = torch.compile(net, backend=backend)
    task = CompiledTask.from_callable("t", compiled)
    with torch._dynamo.config.patch(optimize_ddp=False):  # as deepmd-kit does
        warmup_compiled(task, [X])
        compiled.eval()
        with torch.no_grad():
            warmup_compiled(task, [X])
        compiled.train()
        assert len(graphs) == 2
        ddp = DDP(compiled)
        ddp(X).sum().backward()
        compiled.eval()
        with torch.no_grad():
            ddp(X)
    assert len(graphs) == 2
    torch._dynamo.reset()
