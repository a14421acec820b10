# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the ranks of `rank_pair` do: one function a case, its answer is JSON."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import pickle
import random
import tempfile
import threading
import time
import traceback
import weakref
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from deepmd_prewarm.compile_counters import CompileMeter
from deepmd_prewarm.prewarm import PrewarmTask, prewarm
from deepmd_prewarm.signs_of_life import Beat, scope_of
from rank_pair import serve
from torch.nn.parallel import DistributedDataParallel

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
    "monitored_barrier",
    "all_gather_object",
    "broadcast_object_list",
)


class Model(torch.nn.Module):
    """A buffer that training changes, randomness, and a dict for a result."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = torch.nn.Linear(width, width)
        self.drop = torch.nn.Dropout(0.0)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, coord: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.drop(torch.tanh(self.norm(self.inner(coord))))
        return {"energy": hidden.sum(-1), "hidden": hidden}


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, **{"backend": "aot_eager", **options})


def raised(call: Any) -> dict[str, Any]:
    """Run, and tell what came out as an exception, and how soon."""
    begin = time.perf_counter()
    try:
        call()
    except BaseException as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "trace": "".join(traceback.format_exception(error)),
            "seconds": time.perf_counter() - begin,
        }
    return {"type": None}


def group_works() -> float:
    """A collective that pairs with a wrong one gives a wrong number."""
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    return value.item()


def without_collectives(call: Any) -> Any:
    """Run with every collective of torch.distributed refused."""
    real = {name: getattr(dist, name) for name in COLLECTIVES}

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective was entered")

    try:
        for name in COLLECTIVES:
            setattr(dist, name, refuse)
            setattr(dist.distributed_c10d, name, refuse)
        return call()
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)


def six_tasks(rank: int) -> dict[str, Any]:
    """Field case A1: six DDP-wrapped tasks, then six steps each."""
    widths = range(3, 9)
    eager = {f"t{w}": Model(w, seed=w) for w in widths}
    wrapped = {
        name: DistributedDataParallel(copy.deepcopy(model))
        for name, model in eager.items()
    }
    calls = {name: compiled(model, dynamic=False) for name, model in wrapped.items()}
    before = {n: copy.deepcopy(m.state_dict()) for n, m in wrapped.items()}
    probes: list[tuple[str, Any, int]] = []
    alive_after: list[int] = []

    def samples(width: int) -> Any:
        def make() -> Any:
            for count in (4, 9):
                coord = torch.randn(count, width)
                probes.append((f"t{width}", weakref.ref(coord), coord.nbytes))
                yield {"coord": coord}
                del coord

        return make

    def count_alive(task: PrewarmTask, record: Any) -> None:
        alive_after.append(sum(ref() is not None for _, ref, _ in probes))

    tasks = [
        PrewarmTask(
            f"t{w}", calls[f"t{w}"], samples(w), graph=f"graph of width {min(w, 7)}"
        )
        for w in widths
    ]
    report = without_collectives(
        lambda: prewarm(tasks, progress=False, before_task=count_alive)
    )
    watch = report.watch()
    unchanged = all(
        torch.equal(value, before[name][key])
        for name, model in wrapped.items()
        for key, value in model.state_dict().items()
    )
    grads = [p.grad for m in wrapped.values() for p in m.parameters()]
    losses, expected = [], []
    for name in wrapped:
        torch.manual_seed(11)
        width = int(name[1:])
        optimizer = torch.optim.SGD(wrapped[name].parameters(), lr=0.1)
        reference = torch.optim.SGD(eager[name].parameters(), lr=0.1)
        for count in (4, 9, 4, 9, 4, 4):
            coord = torch.randn(count, width)  # the same on both ranks
            for model, optimize, into in (
                (calls[name], optimizer, losses),
                (eager[name], reference, expected),
            ):
                optimize.zero_grad()
                loss = model(coord=coord)["energy"].square().mean()
                loss.backward()
                optimize.step()
                into.append(loss.item())
    total = watch.finish()
    content = report.model_dump(mode="json")
    return {
        "losses": losses,
        "expected": expected,
        "compiled_after_start": total,
        "own_after_start": watch.counts().total,
        "unchanged": unchanged,
        "grads_none": all(grad is None for grad in grads),
        "alive_after": alive_after,
        "sample_bytes": {
            name: sum(b for n, _, b in probes if n == name) for name in wrapped
        },
        "report": content,
        "sum": group_works(),
    }


def random_streams(rank: int) -> dict[str, Any]:
    """Field case A4: samples drawn on one rank only, from every stream."""

    def state() -> str:
        streams = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state().numpy().tobytes(),
        )
        return hashlib.sha256(pickle.dumps(streams)).hexdigest()

    def samples() -> Any:
        if rank == 0:
            random.random()
            np.random.rand()
            torch.rand(3)
        yield (torch.randn(4, 3),)

    def hook(task: PrewarmTask, record: Any) -> None:
        random.shuffle([1, 2, 3])

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout())
    random.seed(5 + rank)
    np.random.seed(6)
    torch.manual_seed(7)
    before = state()
    prewarm({"drop": (compiled(model), samples)}, progress=False)
    prewarm(
        [PrewarmTask("again", compiled(model), samples)],
        progress=False,
        before_task=hook,
    )
    return {"before": before, "after": state()}


def differing_tasks(rank: int, names: list[list[str]]) -> dict[str, Any]:
    """Field case A5: ranks come with different tasks."""
    started: list[str] = []

    def task(name: str) -> PrewarmTask:
        def call(x: torch.Tensor) -> torch.Tensor:
            started.append(name)
            return x.sum()

        return PrewarmTask(name, call, [(torch.ones(2),)])

    tasks = [task(name) for name in names[rank]]
    answer = raised(lambda: prewarm(tasks, progress=False))
    return {**answer, "started": started, "sum": group_works()}


def failing_samples(rank: int) -> dict[str, Any]:
    """Field case A6: the samples of task b cannot be had on rank 1."""
    warmed: list[str] = []

    def samples(name: str) -> Any:
        def make() -> Any:
            if rank == 1 and name == "b":
                next(iter([]))  # an empty data set
            return [(torch.ones(2, 3),)]

        return make

    models = {name: compiled(torch.nn.Linear(3, 1)) for name in "abc"}
    tasks = [PrewarmTask(name, models[name], samples(name)) for name in "abc"]

    def note(task: PrewarmTask, record: Any) -> None:
        warmed.append(task.name)

    answer = raised(lambda: prewarm(tasks, progress=False, after_task=note))
    return {**answer, "after_task": warmed, "sum": group_works()}


def failing_compiler(rank: int) -> dict[str, Any]:
    """Field case A7: a compiler that fails for one task on one rank."""

    def picky(graph: Any, inputs: Any) -> Any:
        if rank == 1:
            raise NotImplementedError("CantSplit: ragged batch")
        return graph.forward

    good = torch.nn.Linear(3, 1)
    bad = torch.nn.Linear(3, 2)
    kept = torch.ones(2, 3)
    tasks = [
        PrewarmTask("good", compiled(good), [(kept,)]),
        PrewarmTask("bad", compiled(bad, backend=picky), [(kept,)]),
    ]
    before = copy.deepcopy([*good.parameters(), *bad.parameters()])
    answer = raised(lambda: prewarm(tasks, progress=False))
    report = prewarm(tasks, only=["good"], progress=False)
    meter = CompileMeter().start()
    tasks[0].fn(kept).sum().backward()
    after = [*good.parameters(), *bad.parameters()]
    return {
        **answer,
        "good": report.task("good", rank=rank).source,
        "compiled_later": meter.stop().total,
        "sample_intact": bool((kept == 1).all()),
        "unchanged": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "sum": group_works(),
    }


def failing_call(rank: int, text: str, kind: str) -> dict[str, Any]:
    """Field case D6: what a task raises on rank 1, everybody learns."""
    kinds = {
        "ValueError": ValueError,
        "KeyboardInterrupt": KeyboardInterrupt,
        "SystemExit": SystemExit,
        "MemoryError": MemoryError,
    }

    def call(x: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise kinds[kind](text)
        return x.sum()

    tasks = [PrewarmTask("bad task", call, [(torch.ones(2),)])]
    return {**raised(lambda: prewarm(tasks, progress=False)), "sum": group_works()}


def validation_and_wrapping(rank: int) -> dict[str, Any]:
    """Field case B10: one model for DDP training and plain validation."""
    inner = Model(4, seed=1)
    wrapped = DistributedDataParallel(inner)
    train = compiled(wrapped)
    validate = compiled(inner)
    sample = {"coord": torch.randn(5, 4)}

    def evaluation(coord: torch.Tensor) -> Any:
        inner.eval()
        try:
            with torch.no_grad():
                return validate(coord=coord)
        finally:
            inner.train()

    report = prewarm(
        [
            PrewarmTask("train", train, [sample]),
            PrewarmTask("validate", evaluation, [sample], mode="eval"),
        ],
        progress=False,
    )
    meter = CompileMeter().start()
    train(**sample)["energy"].sum().backward()
    in_training = meter.read().total
    evaluation(**sample)
    in_validation = meter.stop().total - in_training
    backwards = {t.name: t.graphs_backward for t in report.ranks[-1].tasks}
    return {
        "in_training": in_training,
        "in_validation": in_validation,
        "backwards": backwards,
        "training": inner.training,
        "sum": group_works(),
    }


def static_graph(rank: int) -> dict[str, Any]:
    """DDP that learns its graph in iteration 1: a warm-up must not be it."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    wrapped = DistributedDataParallel(model, static_graph=True)
    without_collectives(
        lambda: prewarm({"static": (wrapped, [(torch.ones(2, 3),)])}, progress=False)
    )
    torch.manual_seed(rank)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.randn(2, 3)).sum().backward()
    return {"grads": [p.grad.tolist() for p in model.parameters()]}


def late_rank(rank: int) -> dict[str, Any]:
    """One rank is done at once, the other waits for a sign from outside."""
    gate = dist.PrefixStore("late_rank", dist.distributed_c10d._get_default_store())

    def call(x: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            gate.wait(["go"])  # rank 0 opens it, from its after_task hook
        return x.sum()

    def open_gate(task: PrewarmTask, record: Any) -> None:
        if rank == 0:
            gate.set("go", "")

    report = prewarm(
        {"late": (call, [(torch.ones(2),)])}, progress=False, after_task=open_gate
    )
    return {"ranks": [r.rank for r in report.ranks], "complete": report.is_complete}


def degraded(rank: int, strict: bool) -> dict[str, Any]:
    """The library is missing on rank 1."""
    import logging

    from deepmd_prewarm import _library

    def call(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is warmed")

    problem = ImportError("built for torch 9.9")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deepmd_prewarm.prewarm")
    logger.addHandler(handler)
    try:
        with (
            mock.patch.object(
                _library, "load", side_effect=problem if rank == 1 else None
            ),
            mock.patch.dict(os.environ, {"DP_PREWARM_STRICT": str(int(strict))}),
        ):
            got: list[Any] = []
            answer = raised(
                lambda: got.append(
                    prewarm({"a": (call, [(torch.ones(1),)])}, progress=False)
                )
            )
    finally:
        logger.removeHandler(handler)
    reasons = got[0].degraded if got else []
    return {**answer, "degraded": reasons, "warnings": messages, "sum": group_works()}


def subgroups(rank: int) -> dict[str, Any]:
    """Each rank alone in its own group waits for nobody; then both together."""
    groups = [dist.new_group([r]) for r in range(2)]
    pair = dist.new_group([0, 1])
    alone = prewarm(
        {f"only on {rank}": (torch.nn.Linear(2, 1), [(torch.ones(1, 2),)])},
        groups[rank],
        progress=False,
    )
    both = prewarm(
        {"both": (torch.nn.Linear(2, 1), [(torch.ones(1, 2),)])}, pair, progress=False
    )
    gc.collect()
    return {
        "alone": alone.world_size,
        "both": both.world_size,
        "complete": both.is_complete,
    }


def beats(rank: int) -> Beat:
    """Read rank's heartbeat, as others see it."""
    store = dist.group.WORLD.get_group_store()
    beat = Beat.parse(store.get(f"{scope_of(2)}/beat/{rank}"))
    assert beat is not None
    return beat


def phases(rank: int) -> dict[str, Any]:
    """What heartbeats say while a task is warmed, and when training begins."""
    seen: list[str] = []

    def samples(name: str) -> Any:
        def make() -> Any:
            pause = threading.Event()
            while (beat := beats(rank)).phase != f"compile {name}":
                pause.wait(0.01)
            seen.append(beat.phase)
            return [(torch.ones(2, 3),)]

        return make

    tasks = [
        PrewarmTask(name, compiled(torch.nn.Linear(3, 1)), samples(name))
        for name in ("water", "metal")
    ]
    prewarm(tasks, progress=False)
    pause = threading.Event()
    while (beat := beats(rank)).phase != "training" or beat.period_s != 10.0:
        pause.wait(0.01)
    return {"seen": seen, "sum": group_works()}


def mixes(rank: int, misses: list[bool]) -> dict[str, Any]:
    """Field case B2: one rank finds its graph compiled, the other does not."""
    model = Model(4, seed=1)
    call = compiled(model)
    sample = {"coord": torch.randn(5, 4)}
    if not misses[rank]:
        call(**sample)["energy"].sum().backward()
        model.zero_grad(set_to_none=True)
    meter = CompileMeter().start()
    report = without_collectives(
        lambda: prewarm([PrewarmTask("a", call, [sample])], progress=False)
    )
    return {
        "compiled": meter.stop().total > 0,
        "source": report.task("a", rank=rank).source,
        "sum": group_works(),
    }


def stagger(rank: int, late: list[int]) -> dict[str, Any]:
    """Field case B7: ranks compile at once, or one only when the other is done."""

    def samples() -> Any:
        pause = threading.Event()
        other = 1 - rank
        while rank in late and beats(other).phase != "a":
            pause.wait(0.01)
        return [(torch.ones(2, 3),)]

    task = PrewarmTask("a", compiled(torch.nn.Linear(3, 1)), samples)
    report = prewarm([task], progress=False)
    return {"ready": report.world_size, "sum": group_works()}


def broken_cache(rank: int, broken: list[int]) -> dict[str, Any]:
    """Field case B7: the compiler's cache folder cannot be written on some ranks."""
    net = torch.nn.Linear(3, 1)
    task = PrewarmTask("a", compiled(net, backend="inductor"), [(torch.ones(2, 3),)])
    with tempfile.TemporaryDirectory() as folder:
        # No folder can be made below a file, for root neither.
        place = f"{folder}/cache"
        if rank in broken:
            with open(place, "w") as file:
                file.write("not a folder")
        cache = {"TORCHINDUCTOR_CACHE_DIR": f"{place}/inductor"}
        with mock.patch.dict(os.environ, cache):
            failed = raised(lambda: prewarm([task], progress=False))
        between = group_works()
    torch._dynamo.reset()
    report = prewarm([task], progress=False)
    return {
        **failed,
        "between": between,
        "later": report.task("a", rank=rank).source,
        "sum": group_works(),
    }


def connected(rank: int) -> dict[str, Any]:
    """Make CPU the accelerator: the group's communicator is used, once."""
    from deepmd_prewarm.agreement import connect_communicators

    without = connect_communicators()
    real = torch.accelerator.current_accelerator
    calls: list[str] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        calls.append(tensor.device.type)
        return all_reduce(tensor, **options)

    torch.accelerator.current_accelerator = lambda **_: torch.device("cpu")
    index = torch.accelerator.current_device_index
    torch.accelerator.current_device_index = lambda: 0
    synchronize = torch.accelerator.synchronize
    torch.accelerator.synchronize = lambda device: calls.append("synchronized")
    dist.all_reduce = counted
    try:
        connects = connect_communicators()
    finally:
        torch.accelerator.current_accelerator = real
        torch.accelerator.current_device_index = index
        torch.accelerator.synchronize = synchronize
        dist.all_reduce = all_reduce
    return {
        "without": without,
        "with": connects,
        "calls": calls,
        "sum": group_works(),
    }


CASES = {
    function.__name__: function
    for function in (
        six_tasks,
        random_streams,
        differing_tasks,
        failing_samples,
        failing_compiler,
        failing_call,
        validation_and_wrapping,
        static_graph,
        late_rank,
        degraded,
        subgroups,
        phases,
        mixes,
        stagger,
        broken_cache,
        connected,
    )
}

if __name__ == "__main__":
    serve(CASES)
