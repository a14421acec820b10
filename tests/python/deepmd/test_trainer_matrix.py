# SPDX-License-Identifier: LGPL-3.0-or-later
"""deepmd-kit's own trainer with the plugin, beside the same training without it.

Two processes run the same list of trainings at the same time, one with
`DP_PREWARM=0`. Inductor is left out here (Dynamo guards and AOTAutograd graphs are
what shape classes are about); `test_trainer_ranks` has it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import trainer_cases
from conftest import HERE, Run, finish, start

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(1800)]

NAMES = [
    "several tasks",
    "restart",
    "dense",
    "lmdb and ema",
    "ragged lmdb and zero",
    "frame and atom parameters",
    "spin",
    "init-model",
    "finetune",
]


@dataclass(frozen=True)
class Pair:
    """The same training with the plugin and without."""

    plugin: Run
    stock: Run


@pytest.fixture(scope="session")
def pairs(
    trainer_data: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("matrix")
    cases = trainer_cases.cases(trainer_data)
    assert [case["name"] for case in cases] == NAMES
    (folder / "cases.json").write_text(json.dumps(cases))
    script = str(HERE / "run_cases.py")
    logs = {word: folder / f"{word}.log" for word in ("plugin", "stock")}
    running = {
        word: start(
            [script, "cases.json", word],
            log,
            DP_PREWARM="1" if word == "plugin" else "0",
            DP_PREWARM_STRICT="1",
        )
        for word, log in logs.items()
    }
    codes = {word: finish(process, logs[word]) for word, process in running.items()}
    assert codes == {"plugin": 0, "stock": 0}
    return {
        name: Pair(Run(folder / "plugin" / name), Run(folder / "stock" / name))
        for name in NAMES
    }


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    one = pairs[request.param]
    assert "error" not in one.stock.facts, one.stock.facts["error"]
    assert "error" not in one.plugin.facts, one.plugin.facts["error"]
    return one


def test_training_is_bitwise_what_it_is_without_the_plugin(pair: Pair) -> None:
    import torch

    assert pair.plugin.facts["steps"] == pair.stock.facts["steps"]
    assert pair.plugin.lcurve == pair.stock.lcurve
    assert pair.plugin.checkpoints == pair.stock.checkpoints != []
    for checkpoint in pair.stock.checkpoints:
        stock, plugin = pair.stock.tensors(checkpoint), pair.plugin.tensors(checkpoint)
        assert plugin.keys() == stock.keys()
        for path, value in stock.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, plugin[path]), f"{checkpoint}{path}"
            else:
                assert value == plugin[path], f"{checkpoint}{path}"


def test_nothing_compiles_from_step_1_on(pair: Pair) -> None:
    assert pair.stock.facts["compiled_after_start"] > 0  # the control
    assert pair.plugin.facts["compiled_after_start"] == 0
    assert pair.plugin.report["compiled_after_start"] == 0


def test_prewarming_compiles_what_training_would_have_and_no_more(pair: Pair) -> None:
    made = pair.plugin.facts["compiled_in_all"]
    lazily = pair.stock.facts["compiled_in_all"]
    # Training may end before a class of its data was drawn.
    assert lazily <= made <= lazily + 2


def test_no_trace_time_input_is_alive_when_the_next_task_starts(pair: Pair) -> None:
    alive = pair.plugin.facts["trace_inputs_alive"]
    assert alive != []
    if "Default/eval" in tasks_of(pair.plugin):
        # The eval trace of the same task takes the copies of its buffers once more.
        assert [len(one) for one in alive] == [0, 2]
        return
    assert not any(alive)


def test_copies_of_task_buffers_are_gone_once_they_were_traced(pair: Pair) -> None:
    assert pair.stock.facts["task_buffers"] != []  # the control
    assert pair.plugin.facts["task_buffers"] == []


def test_no_graph_survives_a_display(pair: Pair) -> None:
    assert any(pair.stock.facts["graphs_after_display"])  # the control
    assert not any(pair.plugin.facts["graphs_after_display"])


def test_inputs_and_labels_of_a_display_are_dropped(pair: Pair) -> None:
    # Already upstream in 3.2.0: locals of evaluate_*, and no graph saves them.
    assert not any(pair.stock.facts["inputs_alive_after_display"])
    assert not any(pair.plugin.facts["inputs_alive_after_display"])


def test_each_compiled_lower_has_its_lifeline_and_no_new_state(pair: Pair) -> None:
    facts = pair.plugin.facts
    assert pair.stock.facts["lifelines"] == 0  # the control
    # Training may end before stock compiled every task.
    assert facts["lifelines"] == facts["lowers"] >= pair.stock.facts["lowers"] > 0
    assert facts["state_keys"] == pair.stock.facts["state_keys"]


def test_modules_are_in_train_mode_as_training_left_them(pair: Pair) -> None:
    assert pair.plugin.facts["training_modes"] == pair.stock.facts["training_modes"]


def test_bytes_of_each_task_are_told(pair: Pair) -> None:
    (rank,) = pair.plugin.report["ranks"]
    assert all(task["bytes_released"] > 0 for task in rank["tasks"])
    traced = [task for task in rank["tasks"] if task["source"] != "shared"]
    assert all(task["trace_s"] > 0 for task in traced)


def tasks_of(run: Run) -> dict[str, dict[str, Any]]:
    (rank,) = run.report["ranks"]
    return {task["name"]: task for task in rank["tasks"]}


def test_one_stock_trace_leaves_its_inputs_to_the_next(pairs: dict[str, Pair]) -> None:
    assert any(pairs["several tasks"].stock.facts["trace_inputs_alive"])


def test_every_layout_of_a_task_is_warmed(pairs: dict[str, Pair]) -> None:
    tasks = tasks_of(pairs["several tasks"].plugin)
    # 8 atoms x 1 frame; 4 atoms x 2 frames, and x 1 in the set of one frame
    assert {name: task["samples"] for name, task in tasks.items()} == {
        "one": 3,
        "two": 1,
        "three": 1,
    }


def test_tasks_of_one_structure_share_their_graph(pairs: dict[str, Pair]) -> None:
    tasks = tasks_of(pairs["several tasks"].plugin)
    assert tasks["one"]["source"] == "compiled"
    assert tasks["two"]["source"] == "shared"
    assert tasks["two"]["graph"] == tasks["one"]["graph"]
    assert tasks["three"]["graph"] != tasks["one"]["graph"]


def test_compiled_evaluation_is_warmed_as_its_own_graph(pairs: dict[str, Pair]) -> None:
    tasks = tasks_of(pairs["dense"].plugin)
    assert {name: task["mode"] for name, task in tasks.items()} == {
        "Default": "train",
        "Default/eval": "eval",
    }
    assert tasks["Default/eval"]["graph"] != tasks["Default"]["graph"]
    assert (pairs["dense"].plugin.folder / "val.log").read_text() == (
        pairs["dense"].stock.folder / "val.log"
    ).read_text()


def test_the_averaged_checkpoint_is_written_too(pairs: dict[str, Pair]) -> None:
    assert "model_ema.ckpt-6.pt" in pairs["lmdb and ema"].plugin.checkpoints


def test_a_restart_goes_on_from_the_checkpoint_of_a_prewarmed_training(
    pairs: dict[str, Pair],
) -> None:
    steps = [
        int(line.split()[0])
        for line in pairs["restart"].plugin.lcurve.splitlines()
        if not line.startswith("#")
    ]
    assert steps == [11, 12, 13, 14]
