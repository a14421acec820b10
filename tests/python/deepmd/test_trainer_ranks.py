# SPDX-License-Identifier: LGPL-3.0-or-later
"""Two ranks of deepmd-kit's trainer compile, fail or degrade together."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HERE, Run, finish, start
from trainer_inputs import GRAPH, Data, multi

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(1800)]


def two_tasks(data: Data, steps: int) -> dict[str, Any]:
    tasks = {"one": ("4", [data.large, data.small]), "three": ("5", [data.silver])}
    return multi(tasks, steps=steps, descriptor=GRAPH)


# One torchrun job with Inductor: a rank 40 s late, collectives time out after 30 s:
# deepmd-kit's own wait for rank 0's statistics, before us, takes up to 15 on a busy
# machine. `tests/bench/bench_seed_case.py` has 15 s.


def _torchrun(folder: Path, data: Data, *options: str, **more: str) -> Run:
    folder.mkdir()
    content = two_tasks(data, 8)
    content["training"]["disp_freq"] = 4
    (folder / "input.json").write_text(json.dumps(content))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(HERE / "slow_rank.py"), "input.json", "--skip-neighbor-stat"]
    log = folder / "log"
    process = start([*command, "--seed", "7", *options], log, **more)
    assert finish(process, log) == 0
    return Run(folder)


@pytest.fixture(scope="session")
def late_rank(trainer_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("ranks") / "plugin"
    return _torchrun(
        folder,
        trainer_data,
        "--timeout",
        "30",
        "--report",
        str(folder),
        DP_PREWARM="1",
        DP_PREWARM_STRICT="1",
    )


def test_a_rank_that_is_late_by_more_than_the_time_out_is_waited_for(
    late_rank: Run,
) -> None:
    report = late_rank.report
    assert report["group_timeout_s"] == 30
    assert report["world_size"] == 2
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    first = report["ranks"][0]["tasks"][0]
    assert first["wait_s"] > 30


def test_with_inductor_nothing_compiles_from_step_1_on(late_rank: Run) -> None:
    assert late_rank.report["compiled_after_start"] == 0
    for rank in late_rank.report["ranks"]:
        names = [(task["name"], task["mode"]) for task in rank["tasks"]]
        assert names == [("one", "train"), ("three", "train")]
        one, three = rank["tasks"]
        # 8 atoms x 1 frame, 4 atoms x 2 frames: forward and backward of each
        assert (one["graphs_forward"], one["graphs_backward"]) == (2, 2)
        assert (three["graphs_forward"], three["graphs_backward"]) == (1, 1)
        assert not one["eager"]


def test_with_inductor_training_is_bitwise_what_it_is_without_the_plugin(
    late_rank: Run, trainer_data: Data, tmp_path: Path
) -> None:
    stock = _torchrun(tmp_path / "stock", trainer_data, DP_PREWARM="0", SLOW="0")
    assert late_rank.lcurve == stock.lcurve
    assert late_rank.checkpoints == stock.checkpoints != []
    for checkpoint in stock.checkpoints:
        ours, theirs = late_rank.tensors(checkpoint), stock.tensors(checkpoint)
        assert ours.keys() == theirs.keys()
        for path, value in theirs.items():
            same = (
                torch.equal(value, ours[path])
                if isinstance(value, torch.Tensor)
                else value == ours[path]
            )
            assert same, f"{checkpoint}{path}"


# One pair of processes, one case after the other, without Inductor.

_FAULTS = ("data", "compiler", "library")


@pytest.fixture(scope="session")
def faults(
    trainer_data: Data, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Run]]:
    folder = tmp_path_factory.mktemp("faults")
    cases = [
        {
            "name": kind,
            "grouped": True,
            "input": two_tasks(trainer_data, 2),
            "fault": {"rank": 1, "kind": kind},
        }
        for kind in _FAULTS
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    running = [
        start(
            [str(HERE / "run_cases.py"), "cases.json", "out"],
            log,
            DP_PREWARM="1",
            DP_PREWARM_STRICT="0",
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank, log in enumerate(logs)
    ]
    for process, log in zip(running, logs, strict=True):
        assert finish(process, log) == 0
    return {
        kind: [Run(folder / "out" / kind / str(rank)) for rank in range(2)]
        for kind in _FAULTS
    }


def test_data_that_one_rank_cannot_read_end_the_training_on_all(
    faults: dict[str, list[Run]],
) -> None:
    other, failing = (run.facts for run in faults["data"])
    assert failing["error_type"] == "ValueError"
    assert failing["error_text"] == "frame 7 is damaged: größer als erwartet\nline 2"
    assert "unreadable" in failing["error"]  # its own traceback
    assert other["error_type"] == "RuntimeError"
    for part in ("rank 1", "three", "frame 7 is damaged: größer als erwartet"):
        assert part in other["error_text"]
    assert other["steps"] == failing["steps"] == []


def test_a_compiler_error_on_one_rank_is_raised_on_all(
    faults: dict[str, list[Run]],
) -> None:
    other, failing = (run.facts for run in faults["compiler"])
    assert failing["error_type"] == "NotImplementedError"
    assert other["error_type"] == "RuntimeError"
    for part in ("rank 1", "three", "no kernel for this graph"):
        assert part in other["error_text"]
    assert other["steps"] == failing["steps"] == []


def test_a_library_missing_on_one_rank_degrades_on_all_with_one_warning(
    faults: dict[str, list[Run]],
) -> None:
    chief, missing = (run.facts for run in faults["library"])
    for facts in (chief, missing):
        assert "error" not in facts, facts["error"]
        assert len(facts["steps"]) == 2
        # Unchanged training: stock's lazy compile, stock's memory after displays.
        assert facts["compiled_after_start"] > 0
        assert facts["lifelines"] == 0
        assert facts["task_buffers"] == ["one", "three"]
    assert any(chief["graphs_after_display"])
    assert missing["warnings"] == []
    (warning,) = chief["warnings"]
    assert "rank 1: ImportError: libdeepmd_prewarm.so: built for torch" in warning
    assert not os.path.exists(faults["library"][0].folder / "prewarm.json")
