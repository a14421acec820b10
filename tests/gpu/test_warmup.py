# SPDX-License-Identifier: LGPL-3.0-or-later
"""Warming a graph that Inductor compiled for the device."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import run_apart

deepmd_prewarm = pytest.importorskip("deepmd_prewarm")


def make_model(width: int = 64) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Dropout(0.5),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 1),
    ).cuda()


def test_training_compiles_nothing_more_and_starts_as_if_nothing_had_run(device, note):
    from deepmd_prewarm.compile_counters import CompileMeter

    torch.manual_seed(5)
    model = make_model()
    compiled = torch.compile(model)
    sample = torch.randn(32, 64, device=device)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.cuda.get_rng_state(device)
    task = deepmd_prewarm.CompiledTask.from_callable("task", compiled, [model])
    meter = CompileMeter().start()
    deepmd_prewarm.warmup_compiled(task, [sample])
    warmed = meter.stop()
    assert warmed.forward >= 1 and warmed.backward >= 1
    assert task.is_warm()
    assert torch.equal(torch.cuda.get_rng_state(device), stream)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    meter = CompileMeter().start()
    compiled(sample).sum().backward()
    torch.cuda.synchronize()
    after = meter.stop()
    assert after.total == 0
    assert all(parameter.grad is not None for parameter in model.parameters())
    note(graphs=f"{warmed.forward}+{warmed.backward}", after_step_1=after.total)


def test_the_ranges_of_a_warm_up_are_there_for_profilers(device):
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Linear(4, 1).to(device)
    task = deepmd_prewarm.CompiledTask.from_callable("water", model, [model])
    sample = torch.ones(2, 4, device=device)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        deepmd_prewarm.warmup_compiled(task, [sample])
    names = {event.name for event in seen.events()}
    assert {
        "deepmd_prewarm::warmup water",
        "deepmd_prewarm::forward",
        "deepmd_prewarm::backward",
    } <= names
    with torch.autograd.profiler.emit_nvtx():
        deepmd_prewarm.warmup_compiled(task, [sample])


GROWTH = """
import json, torch, deepmd_prewarm
kept, curve = [], []
for number in range(4):
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64 + number), torch.nn.Tanh(),
        torch.nn.Linear(64 + number, 1)).cuda()
    compiled = torch.compile(model)
    task = deepmd_prewarm.CompiledTask.from_callable(str(number), compiled, [model])
    inputs = [torch.randn(1 << 18, 64, device="cuda")]
    deepmd_prewarm.warmup_compiled(task, inputs)
    if {release}:
        deepmd_prewarm.release_trace_inputs(inputs)
        deepmd_prewarm.safe_empty_cache("cuda")
    kept += [compiled, task, inputs]  # as a trainer's trace cache holds them
    torch.cuda.synchronize()
    curve.append(deepmd_prewarm.cache_bytes("cuda")[0] >> 20)
print(json.dumps(curve))
"""


def test_device_memory_no_longer_grows_with_tasks(note):
    stock = json.loads(run_apart(GROWTH.format(release=False)).splitlines()[-1])
    ours = json.loads(run_apart(GROWTH.format(release=True)).splitlines()[-1])
    note(stock_MB=stock, released_MB=ours)
    assert stock[-1] - stock[0] >= 3 * 60  # 64 MiB a task
    assert ours[-1] - ours[0] <= 8


def test_the_whole_loop_reports_the_device(device, note):
    pytest.importorskip("pydantic")
    model = make_model()
    report = deepmd_prewarm.prewarm(
        {
            "water": (
                torch.compile(model),
                lambda: [(torch.randn(1 << 16, 64, device=device),)],
            )
        },
        progress=False,
    )
    task = report.task("water")
    assert task.device == str(device)
    assert task.device_used_after <= task.device_used_before + (1 << 20)
    assert task.bytes_released >= 1 << 24
    note(before_MB=task.device_before >> 20, after_MB=task.device_after >> 20)
