# SPDX-License-Identifier: LGPL-3.0-or-later
"""Run trainings of deepmd-kit one after the other and write down what was seen.

    python run_cases.py CASES.json OUT

CASES.json lists `{"name", "input", "options", "backend", "grouped", "fault"}`; each
case runs in OUT/<name> and leaves `facts.json` beside what the training wrote.
`{before}` in an option stands for OUT. Everything is seen from outside the plugin, so
that the same eyes look at a stock run (`DP_PREWARM=0`).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.fx.experimental import proxy_tensor

_real_compile = torch.compile
_real_make_fx = proxy_tensor.make_fx


def compiled_so_far() -> int:
    """Graphs compiled by this process: forward, backward, inference."""
    inductor = counters["inductor"]
    codegen = inductor["fxgraph_cache_hit"] + inductor["fxgraph_cache_miss"]
    codegen += inductor["fxgraph_cache_bypass"]
    return max(codegen, counters["stats"]["unique_graphs"])


class Eyes:
    """What is alive when it should not be, and what compiles when."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {
            "trace_inputs_alive": [],
            "graphs_after_display": [],
            "inputs_alive_after_display": [],
            "steps": [],
            "compiled_after_start": None,
        }
        self.fed: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self.drawn: list[weakref.ref[torch.Tensor]] = []
        self.at_start: int | None = None

    def make_fx(self, *options: Any, **named: Any) -> Any:
        trace = _real_make_fx(*options, **named)
        if named.get("tracing_mode") != "symbolic":
            return trace  # AOTAutograd's own

        def fed(*inputs: Any) -> Any:
            gc.collect()
            alive = [what for what, ref in self.fed if ref() is not None]
            self.facts["trace_inputs_alive"].append(alive)
            for number, value in enumerate(inputs):
                if isinstance(value, torch.Tensor):
                    what = f"{number}: {tuple(value.shape)}"
                    self.fed.append((what, weakref.ref(value)))
            return trace(*inputs)

        return fed


def holds_graph(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    if isinstance(value, dict):
        return any(holds_graph(one) for one in value.values())
    return False


def watch(training: Any, eyes: Eyes) -> dict[str, Any]:
    """Look at the trainer's methods from outside; returns the originals."""
    trainer = training.Trainer
    names = ("train_step", "collect_display_results", "get_data", "on_train_end")
    before = {name: getattr(trainer, name) for name in names}

    def train_step(self: Any, task: Any, step: int) -> Any:
        if eyes.at_start is None:
            eyes.at_start = compiled_so_far()
            eyes.facts["first_step_s"] = time.time()
        result = before["train_step"](self, task, step)
        eyes.facts["steps"].append(task.key)
        return result

    def collect(self: Any, tasks: Any, **kwargs: Any) -> Any:
        eyes.drawn.clear()
        results = before["collect_display_results"](self, tasks, **kwargs)
        holders = [
            key
            for key, loss in self.losses.items()
            if any(holds_graph(value) for value in vars(loss).values())
        ]
        if holds_graph(kwargs["step_result"].payload):
            holders.append("step result")
        eyes.facts["graphs_after_display"].append(holders)
        gc.collect()
        eyes.facts["inputs_alive_after_display"].append(
            sum(ref() is not None for ref in eyes.drawn)
        )
        return results

    def get_data(self: Any, is_train: bool = True, task_key: str = "Default") -> Any:
        inputs, labels = before["get_data"](self, is_train, task_key)
        for value in (*inputs.values(), *labels.values()):
            if isinstance(value, torch.Tensor):
                eyes.drawn.append(weakref.ref(value))
        return inputs, labels

    def on_train_end(self: Any, tasks: Any) -> None:
        if eyes.at_start is not None:
            eyes.facts["compiled_after_start"] = compiled_so_far() - eyes.at_start
        eyes.facts["compiled_in_all"] = compiled_so_far()
        wrapper = self._unwrapped
        lowers = [
            lower
            for model in wrapper.model.values()
            for lower in getattr(model, "_compiled_lower_by_mode", {}).values()
        ]
        eyes.facts["task_buffers"] = [
            key
            for key, model in wrapper.model.items()
            if getattr(model, "_task_buffers", None) is not None
        ]
        eyes.facts["lowers"] = len(lowers)
        eyes.facts["lifelines"] = sum(
            isinstance(vars(lower).get("_traced_lower_ref"), torch.fx.GraphModule)
            for lower in lowers
        )
        eyes.facts["state_keys"] = list(wrapper.state_dict())
        eyes.facts["training_modes"] = sorted({m.training for m in wrapper.modules()})
        eyes.facts["types"] = sorted(
            {type(loss).__name__ for loss in self.losses.values()}
        )
        before["on_train_end"](self, tasks)

    for name, method in zip(
        names, (train_step, collect, get_data, on_train_end), strict=True
    ):
        setattr(trainer, name, method)
    return before


class LastLines(logging.Handler):
    """What the plugin warned about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "prewarm" in record.name:
            self.lines.append(record.getMessage())

    def __enter__(self) -> None:
        for name in ("deepmd.prewarm", "deepmd_prewarm"):
            logging.getLogger(name).addHandler(self)

    def __exit__(self, *_: object) -> None:
        for name in ("deepmd.prewarm", "deepmd_prewarm"):
            logging.getLogger(name).removeHandler(self)


class _Faulty:
    """A fault on one rank: in its data, in its compiler, or in the plugin there."""

    def __init__(self, fault: dict[str, Any] | None, training: Any) -> None:
        rank = int(os.environ.get("RANK", "0"))
        here = fault is not None and fault["rank"] == rank
        self.kind = fault["kind"] if fault is not None and here else ""
        self._trainer = training.Trainer
        self._get_data = training.Trainer.get_data
        self.compiles = 0

    def __enter__(self) -> None:
        if self.kind == "data":
            get_data = self._get_data

            def unreadable(self: Any, is_train: bool = True, task_key: str = "") -> Any:
                if task_key == "three":
                    raise ValueError("frame 7 is damaged: größer als erwartet\nline 2")
                return get_data(self, is_train, task_key)

            self._trainer.get_data = unreadable
        if self.kind == "library":
            from deepmd_prewarm import _library

            def missing() -> None:
                raise ImportError("libdeepmd_prewarm.so: built for torch 2.10.0")

            self._load, _library.load = _library.load, missing

    def compiling(self) -> None:
        self.compiles += 1
        if self.kind == "compiler" and self.compiles == 2:
            raise NotImplementedError("no kernel for this graph")

    def __exit__(self, *_: object) -> None:
        self._trainer.get_data = self._get_data
        if self.kind == "library":
            from deepmd_prewarm import _library

            _library.load = self._load


def seed_all(seed: int) -> None:
    import random

    import numpy as np
    from deepmd.utils import random as dp_random

    random.seed(seed)
    np.random.seed(seed)
    dp_random.seed(seed)
    torch.manual_seed(seed)


def run(case: dict[str, Any], out: Path) -> None:
    import torch.distributed as dist
    from deepmd.pt_expt.entrypoints.main import train
    from deepmd.pt_expt.train import training

    folder = out / case["name"]
    if "RANK" in os.environ:
        folder /= os.environ["RANK"]
    folder.mkdir(parents=True)
    log = LastLines()
    os.chdir(folder)
    Path("input.json").write_text(json.dumps(case["input"]))
    os.environ["DP_PREWARM_REPORT"] = str(folder)
    backend = case.get("backend", "eager")

    def compile_with(function: Any = None, **options: Any) -> Any:
        if not isinstance(function, torch.fx.GraphModule):
            return _real_compile(function, **options)
        faulty.compiling()
        if backend != "inductor":
            options.pop("options", None)
            options["backend"] = backend
        return _real_compile(function, **options)

    faulty = _Faulty(case.get("fault"), training)
    if case.get("grouped") and "RANK" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch._dynamo.reset()
    counters.clear()
    eyes = Eyes()
    before = watch(training, eyes)
    torch.compile = compile_with
    proxy_tensor.make_fx = eyes.make_fx
    begun = time.time()
    try:
        seed_all(7 + int(os.environ.get("RANK", "0")))
        options = {
            key: value.replace("{before}", str(out))
            for key, value in case.get("options", {}).items()
        }
        with faulty, log:
            train("input.json", skip_neighbor_stat=True, **options)
    except Exception as error:
        eyes.facts["error"] = traceback.format_exc()
        eyes.facts["error_type"] = type(error).__name__
        eyes.facts["error_text"] = str(error)
    finally:
        torch.compile = _real_compile
        proxy_tensor.make_fx = _real_make_fx
        for name, method in before.items():
            setattr(training.Trainer, name, method)
        if case.get("grouped") and "RANK" not in os.environ:
            dist.destroy_process_group()
    eyes.facts["warnings"] = log.lines
    eyes.facts["seconds"] = time.time() - begun
    (folder / "facts.json").write_text(json.dumps(eyes.facts, indent=1))
    print(f"{case['name']}: {eyes.facts['seconds']:.1f} s", flush=True)


def main() -> None:
    if "RANK" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).resolve()
    for case in cases:
        run(case, out)
        gc.collect()


if __name__ == "__main__":
    main()
