# SPDX-License-Identifier: LGPL-3.0-or-later
"""Memory against tasks: deepmd-kit's trainer with the plugin and without, side by side.

For every number of tasks both trainings run at the same time, first with an empty
compile cache, then with the one they filled. Resident memory and live tensors are
read at step 1 and at the last step; the slope over the tasks is what one more task
costs. Losses must be bitwise equal. Leaves `task_memory.json` and `.png`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KINDS = ("stock", "prewarmed")


def one_input(root: Path, tasks: int, steps: int) -> dict[str, Any]:
    """Input with tasks that share a descriptor and have a fitting net each."""
    sys.path.insert(0, str(HERE.parent / "python" / "deepmd"))
    from deepmd_prewarm.deepmd_kit.demo_data import emt_frames, write_npy
    from trainer_inputs import multi

    frames = emt_frames("Cu", 12, repeat=(1, 1, 2), alloy="Ag", seed=1)
    system = write_npy(root / "data", frames, type_map=("Cu", "Ag"))
    content = multi(
        {f"task{i}": (str(24 + 4 * i), [system]) for i in range(tasks)}, steps=steps
    )
    content["training"]["disp_freq"] = max(1, steps // 2)
    return content


def train(tasks: int, steps: int) -> None:
    """Be one training; print what was seen as the last line."""
    import psutil
    import torch
    from deepmd.pt_expt.entrypoints.main import train as deepmd_train
    from deepmd.pt_expt.train import training
    from deepmd.utils import random as dp_random

    Path("input.json").write_text(json.dumps(one_input(Path.cwd(), tasks, steps)))
    dp_random.seed(7)
    torch.manual_seed(7)
    seen: dict[str, Any] = {}
    drawn: list[str] = []
    original = training.Trainer.train_step
    done: list[float] = []

    def look(when: str) -> None:
        gc.collect()
        kinds = [type(one) for one in gc.get_objects()]
        seen[when] = {
            "rss_mb": psutil.Process().memory_info().rss / 1e6,
            "tensors": sum(issubclass(kind, torch.Tensor) for kind in kinds),
        }

    def train_step(self: Any, task: Any, step: int) -> Any:
        result = original(self, task, step)
        done.append(time.perf_counter())
        drawn.append(task.key)
        # Stock compiles a task when it is first drawn.
        if "all tasks" not in seen and len(set(drawn)) == tasks:
            look("all tasks")
        if len(done) == steps:
            look("last step")
        return result

    training.Trainer.train_step = train_step
    deepmd_train("input.json", skip_neighbor_stat=True)
    pairs = sorted(b - a for a, b in itertools.pairwise(done))
    seen["median_step_s"] = pairs[len(pairs) // 2]
    seen["lcurve"] = Path("lcurve.out").read_text()
    print(json.dumps(seen))


def run_both(tasks: int, steps: int, caches: dict[str, Path]) -> dict[str, Any]:
    """Run both kinds at the same time, with these compile caches."""
    running = {}
    for kind in KINDS:
        folder = tempfile.mkdtemp(prefix=f"{kind}-")
        running[kind] = subprocess.Popen(
            [sys.executable, __file__, "--child", str(tasks), "--steps", str(steps)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "DP_PREWARM": "0" if kind == "stock" else "1",
                "DP_PREWARM_STRICT": "1",
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(caches[kind]),
            },
        )
    out = {kind: process.communicate()[0] for kind, process in running.items()}
    for kind, process in running.items():
        if process.returncode:
            raise SystemExit(f"{kind} training of {tasks} tasks failed: {out[kind]}")
    return {kind: json.loads(text.splitlines()[-1]) for kind, text in out.items()}


def slope(xs: list[int], ys: list[float]) -> float:
    """Least-squares slope."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return over / sum((x - mean_x) ** 2 for x in xs)


def draw(results: dict[str, Any], counts: list[int], path: Path) -> None:
    """Draw resident memory and live tensors against tasks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, what, label in (
        (axes[0], "rss_mb", "resident memory, MB above one task"),
        (axes[1], "tensors", "live tensors above one task"),
    ):
        for kind, colour in zip(KINDS, ("tab:red", "tab:blue"), strict=True):
            for cache, style in zip(results, ("-", "--"), strict=False):
                values = [
                    results[cache][str(n)][kind]["last step"][what] for n in counts
                ]
                slope_of = slope(counts, values)
                axis.plot(
                    counts,
                    [value - values[0] for value in values],
                    style,
                    color=colour,
                    marker="o",
                    label=f"{kind}, {cache} cache: {slope_of:+.1f} a task",
                )
        axis.set_xlabel("tasks")
        axis.set_ylabel(label)
        axis.legend()
        axis.grid(alpha=0.3)
    figure.suptitle("deepmd-kit 3.2.0, 1 rank, CPU: memory against tasks")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run, print a table, leave JSON and picture; 0 if losses are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--caches", nargs="+", default=["cold", "warm"])
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options.child, options.steps)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {cache: {} for cache in options.caches}
    equal = True
    for tasks in options.tasks:
        caches = {kind: Path(tempfile.mkdtemp(prefix="cache-")) for kind in KINDS}
        for cache in results:
            both = run_both(tasks, options.steps, caches)
            equal = equal and both["stock"]["lcurve"] == both["prewarmed"]["lcurve"]
            results[cache][str(tasks)] = both
            print(
                f"{tasks} tasks, {cache} cache: "
                + "; ".join(
                    f"{kind} {seen['last step']['rss_mb']:.0f} MB,"
                    f" {seen['last step']['tensors']} tensors,"
                    f" {seen['median_step_s'] * 1e3:.1f} ms a step"
                    for kind, seen in both.items()
                ),
                flush=True,
            )
    (options.out / "task_memory.json").write_text(json.dumps(results, indent=1))
    for cache, by_count in results.items():
        for when in ("all tasks", "last step"):
            for what in ("rss_mb", "tensors"):
                stock, ours = (
                    slope(
                        options.tasks,
                        [by_count[str(n)][kind][when][what] for n in options.tasks],
                    )
                    for kind in KINDS
                )
                print(
                    f"per further task, {cache} cache, {when}: {what}"
                    f" stock {stock:.1f}, prewarmed {ours:.1f}"
                )
    draw(results, options.tasks, options.out / "task_memory.png")
    print("losses bitwise equal" if equal else "losses DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
