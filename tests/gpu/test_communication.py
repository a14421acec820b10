# SPDX-License-Identifier: LGPL-3.0-or-later
"""A group of one rank over NCCL, and what the doctor says of this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from conftest import run_apart

pytest.importorskip("deepmd_prewarm")

GROUP = """
import datetime, json, sys, torch
import torch.distributed as dist
from deepmd_prewarm._library import bridge
from deepmd_prewarm.agreement import connect_communicators
device = torch.device("cuda", 0)
dist.init_process_group(
    "nccl", store=dist.HashStore(), rank=0, world_size=1,
    timeout=datetime.timedelta(seconds=77), **({options}))
name = dist.group.WORLD.group_name
torch.ones(1, device=device)
before = bridge().backend_states(name, 0)
first = bridge().connect_backend(name, "cuda:0")
after = bridge().backend_states(name, 0)
second = bridge().connect_backend(name, "cuda:0")
assert connect_communicators(None, device)
x = torch.full((4,), 2.0, device=device)
dist.all_reduce(x)
assert x.sum().item() == 8
print(json.dumps([before, first, after, second]))
sys.stdout.flush()
dist.destroy_process_group()
"""


def test_communicators_connect_before_the_first_collective(note):
    text = run_apart(GROUP.format(options="{}"))
    before, first, after, second = json.loads(text.splitlines()[-1])
    assert before[0]["communicator"] == "not connected", before
    assert first is True
    assert after[0]["communicator"] == "ncclSuccess", after
    assert after[0]["error"] == "none"
    assert after[0]["timeout_s"] == 77
    assert second is False  # a second communicator would be made
    note(**{key: value for key, value in after[0].items() if key != "device"})


def test_a_group_bound_to_its_device_is_connected_already():
    text = run_apart(GROUP.format(options="{'device_id': device}"))
    before, first, after, second = json.loads(text.splitlines()[-1])
    assert (first, second) == (False, False)
    assert before[0]["communicator"] == after[0]["communicator"] == "ncclSuccess"


def test_a_report_tells_time_out_and_health():
    pytest.importorskip("pydantic")
    code = """
import datetime, torch, deepmd_prewarm
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1,
                        timeout=datetime.timedelta(seconds=77))
model = torch.nn.Linear(4, 1).cuda()
report = deepmd_prewarm.prewarm(
    {"t": (model, [(torch.ones(2, 4, device="cuda"),)])}, progress=False)
backend = report.ranks[0].backends[0]
print(report.group_timeout_s, backend.name, backend.communicator, backend.problem)
dist.destroy_process_group()
"""
    assert run_apart(code).splitlines()[-1].split() == ["77.0", "nccl", "ncclSuccess"]


def test_the_doctor_runs_a_kernel_and_names_the_versions(note):
    done = subprocess.run(
        [sys.executable, "-m", "deepmd_prewarm.cli", "doctor", "--device"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = {line[6:22].strip(): line[22:] for line in done.stdout.splitlines()}
    assert "kernel on cuda:0" in done.stdout, done.stdout + done.stderr
    assert "ran, result right" in done.stdout, done.stdout
    assert "libdeepmd_prewarm_cuda.so" in lines["device"], done.stdout
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    assert f"NCCL {nccl}" in lines["communication"]
    note(device=lines["device"].split(";")[0])
