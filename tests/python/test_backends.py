# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a report tells of the process group, and what profilers see of a warm-up."""

from __future__ import annotations

import json

from deepmd_prewarm.report import BackendRecord, PrewarmReport, RankRecord
from deepmd_prewarm.report_table import tabulate
from fresh_process import output

GROUP = """
import datetime, json, torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
import deepmd_prewarm
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1,
                        timeout=datetime.timedelta(seconds=33))
model = torch.nn.Linear(4, 1)
with profile(activities=[ProfilerActivity.CPU]) as seen:
    report = deepmd_prewarm.prewarm(
        {"water": (model, [(torch.ones(2, 4),)])}, progress=False)
names = {event.name for event in seen.events()}
print(json.dumps([
    report.ranks[0].backends[0].model_dump(), report.table().caption,
    sorted(name for name in names if name.startswith("deepmd_prewarm::"))]))
"""


def test_a_report_has_the_groups_time_out_and_profilers_see_the_phases():
    backend, caption, ranges = json.loads(output(GROUP).splitlines()[-1])
    assert backend == {
        "device": "cpu",
        "name": "gloo",
        "timeout_s": 33.0,
        "error": "",  # gloo does not tell
        "communicator": "",
    }
    assert "process group time-out 33 s (gloo 33 s)" in caption
    assert ranges == [
        "deepmd_prewarm::backward",
        "deepmd_prewarm::forward",
        "deepmd_prewarm::warmup water",
        "deepmd_prewarm::water",
    ]


def report_of(**backend: str) -> PrewarmReport:
    record = BackendRecord(device="cuda", name="nccl", timeout_s=600, **backend)
    ranks = [RankRecord(rank=0, host="a", pid=1, backends=[record])]
    return PrewarmReport(version="0", world_size=1, ranks=ranks)


def test_a_sick_communicator_is_a_warning_of_the_report():
    for error, communicator, problem in (
        ("none", "ncclSuccess", ""),
        ("", "", ""),
        ("none", "not connected", ""),
        ("time-out", "ncclSuccess", "time-out"),
        ("none", "ncclRemoteError", "ncclRemoteError"),
    ):
        report = report_of(error=error, communicator=communicator)
        expected = [f"rank 0: nccl on cuda reports {problem}"] if problem else []
        assert report.warnings() == expected
        assert report.ranks[0].backends[0].problem == problem
    assert "nccl 600 s, ncclRemoteError" in str(tabulate(report).caption)
    again = PrewarmReport.model_validate_json(report.model_dump_json())
    assert again.ranks[0].backends[0].communicator == "ncclRemoteError"
