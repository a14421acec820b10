# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a call costs, from C++ and from Python, next to its goal.

CPU time, the best of several rounds, so that a busy machine does not matter.
Exit code 1 if a goal is missed. The C++ part needs Google Benchmark (Debian:
libbenchmark-dev) and is left out, with a line that says so, where it is missing.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepmd_prewarm
import torch

BUILD = Path(__file__).parents[2] / "build" / "torch-2.11"
MISSING = "C++: left out, no Google Benchmark (apt-get install libbenchmark-dev)"
# From C++, in microseconds.
GOALS_CPP = {"release_six_tensors/manual_time": 5.0, "safe_empty_cache_cpu": 1.0}


def show(name: str, took_us: float, goal_us: float | None, goal: str = "") -> bool:
    """Print one line; return whether the goal, if any, was met."""
    met = goal_us is None or took_us <= goal_us
    limit = "" if goal_us is None else f"  goal {goal_us:8.2f} us {goal}"
    print(f"  {name:58s} {took_us:9.2f} us{limit}{'' if met else '  MISSED'}")
    return met


def from_cpp() -> bool:
    """Build and run the C++ program."""
    ninja = Path(sys.executable).with_name("ninja")
    target = "bench_operators"
    known = subprocess.run(
        [ninja, "-C", BUILD, "-t", "query", target], capture_output=True
    )
    if known.returncode != 0:
        print(MISSING)
        return True
    subprocess.run([ninja, "-C", BUILD, target], check=True, capture_output=True)
    done = subprocess.run(
        [
            BUILD / "bench" / target,
            "--benchmark_format=json",
            "--benchmark_repetitions=7",
            "--benchmark_min_time=0.05",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    best: dict[str, float] = {}
    for run in json.loads(done.stdout)["benchmarks"]:
        if run["run_type"] == "iteration":
            took = run["real_time" if "manual" in run["name"] else "cpu_time"] / 1e3
            best[run["name"]] = min(took, best.get(run["name"], took))
    print("from C++, through the dispatcher:")
    met = [show(name, took, GOALS_CPP.get(name)) for name, took in best.items()]
    return all(met)


def best_us(
    call: Callable[[Any], object],
    prepare: Callable[[], Any] = lambda: None,
    rounds: int = 60,
    calls: int = 50,
) -> float:
    """Time `call` on `calls` prepared arguments; the best of some rounds.

    Few calls at a time: the tensors shall be in the caches, as fresh ones are.
    """
    assert call(prepare()) != 0  # bytes released
    best = float("inf")
    for _ in range(rounds):
        arguments = [prepare() for _ in range(calls)]
        start = time.process_time_ns()
        for argument in arguments:
            call(argument)
        best = min(best, (time.process_time_ns() - start) / calls / 1e3)
    return best


def frame() -> list[torch.Tensor]:
    """Six trace inputs: one frame of 32 atoms with 64 neighbours each."""
    return [
        torch.ones(1, 96, 3, dtype=torch.float64),
        torch.ones(1, 96).long(),
        torch.ones(1, 32, 64).long(),
        torch.ones(1, 96).long(),
        torch.ones(1, 2, dtype=torch.float64),
        torch.ones(1, 32, 2, dtype=torch.float64),
    ]


def from_python() -> bool:
    """Measure the operators and their typed wrappers."""
    ops = torch.ops.deepmd
    print("from Python:")
    met = [
        show("release of six", best_us(ops.release_trace_inputs, frame), 15.0),
        show(
            "release of six, typed wrapper",
            best_us(deepmd_prewarm.release_trace_inputs, frame),
            None,
        ),
        show(
            "safe_empty_cache(cpu)",
            best_us(ops.safe_empty_cache, lambda: torch.device("cpu")),
            None,
        ),
    ]
    for number in (8, 20):
        losses = {f"rmse_{i}": torch.tensor(i / 8) for i in range(number)}
        item = best_us(lambda _, d=losses: {k: v.item() for k, v in d.items()})
        typed = best_us(lambda _, d=losses: deepmd_prewarm.scalarize_losses(d))
        bare = best_us(lambda _, d=losses: ops.scalarize_losses(d))
        met += [
            show(f"scalars of {number} keys", typed, item, "(one .item() a key)"),
            # torch's own conversion of a dict throws and catches an exception.
            show(f"scalars of {number} keys, bare torch.ops", bare, None),
        ]
    return all(met)


def look_at_holders() -> bool:
    """Time the typed wrapper's look in a process with a million objects."""
    heap = [[i] for i in range(500_000)], [{"key": []} for _ in range(250_000)]
    print(f"typed release of six among {len(gc.get_objects()):,} objects:")

    def plain(tensors: list[torch.Tensor]) -> int:
        return deepmd_prewarm.release_trace_inputs(tensors)

    def captured(tensors: list[torch.Tensor]) -> int:
        a, b, c, d, e, f = tensors
        assert [a.shape for _ in (0,) if (b, c, d, e, f)]  # cells before Python 3.12
        inner = lambda: (a, b, c, d, e, f)  # noqa: E731
        del inner
        tensors.clear()
        return deepmd_prewarm.release_trace_inputs([a, b, c, d, e, f])

    def explained(tensors: list[torch.Tensor]) -> list[str]:
        return deepmd_prewarm.explain_release(tensors[:])  # the list holds them

    def switched_off(tensors: list[torch.Tensor]) -> int:
        release = deepmd_prewarm.release_trace_inputs
        return release(tensors, look_for_holders=False)

    met = [
        show(name, best_us(call, frame, rounds=5, calls=2), 150e3)
        for name, call in (
            ("variables of one frame: counts only", plain),
            ("variables that an inner function uses: one pass", captured),
            ("explain_release of held tensors: one pass", explained),
            ("switched off (look_for_holders=False)", switched_off),
        )
    ]
    del heap
    return all(met)


def main() -> int:
    """Run all parts."""
    deepmd_prewarm.load()
    return 0 if all([from_cpp(), from_python(), look_at_holders()]) else 1


if __name__ == "__main__":
    sys.exit(main())
