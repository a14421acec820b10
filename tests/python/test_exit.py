# SPDX-License-Identifier: LGPL-3.0-or-later
"""The interpreter ends, whoever still holds a handle: no hang, no crash."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

TORCH = ".".join(version("torch").split(".")[:2])
HOLDER = next(
    (Path(__file__).parents[2] / "build").glob(
        f"torch-{TORCH}/tests/libstatic_task_holder.so"
    ),
    None,
)
START = """
import atexit, os, sys, threading, torch
# Runs after everything that is registered later, our own closing included.
first = lambda: None
atexit.register(lambda: first())
from deepmd_prewarm import CompiledTask, warmup_compiled
net = torch.nn.Linear(3, 2)
task = CompiledTask.from_callable("t", lambda x: net(x))
warmup_compiled(task, [torch.ones(2, 3)])
class Holder(torch.nn.Module):
    def __init__(self, task):
        super().__init__()
        self.task = task
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.deepmd.warmup_compiled(self.task, [x])
        return x
"""
ENDINGS = {
    "a global": "",
    "a torchscript module": "held = torch.jit.script(Holder(task)); del task",
    "a module and a cycle": "net.task = task; net.held = [Holder(task), net]",
    "a builtin module": "import builtins; builtins.task = task",
    "a leaked reference": (
        "import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))"
    ),
    "an atexit function that runs after ours": (
        "def last():\n"
        "    print(task.backend())\n"
        "    try:\n"
        "        CompiledTask.from_callable('late', net)\n"
        "    except RuntimeError as error:\n"
        "        print(str(error).split('. ')[0])\n"
        "first = last"
    ),
    "a C++ static": (
        f"torch.ops.load_library({str(HOLDER)!r})\n"
        "torch.ops.deepmd_prewarm_test.hold(task); del task"
    ),
    "a thread that is inside a callable": (
        "inside = threading.Event()\n"
        "def stuck(x):\n"
        "    inside.set(); threading.Event().wait(); return x\n"
        "stuck_task = CompiledTask.from_callable('s', stuck)\n"
        "threading.Thread(target=warmup_compiled, args=(stuck_task, [torch.ones(1)]),"
        " daemon=True).start()\n"
        "assert inside.wait(60)"
    ),
    "a thread that keeps warming": (
        "started = threading.Event()\n"
        "def busy():\n"
        "    while True:\n"
        "        warmup_compiled(task, [torch.ones(2, 3)]); started.set()\n"
        "threading.Thread(target=busy, daemon=True).start()\n"
        "assert started.wait(60)"
    ),
    "a thread that runs Python in a callable": (
        "started = threading.Event()\n"
        "def endless(x):\n"
        "    while True:\n"
        "        started.set()\n"
        "endless_task = CompiledTask.from_callable('e', endless)\n"
        "threading.Thread(target=warmup_compiled, args=(endless_task, [torch.ones(1)]),"
        " daemon=True).start()\n"
        "assert started.wait(60)"
    ),
    "threads that keep calling the other operators": (
        "started = [threading.Event() for _ in range(3)]\n"
        "def busy(number, call):\n"
        "    while True:\n"
        "        call(); started[number].set()\n"
        "import deepmd_prewarm\n"
        "calls = [lambda: torch.ops.deepmd.safe_empty_cache('cpu'),\n"
        "    lambda: torch.ops.deepmd.release_trace_inputs([]),\n"
        "    lambda: torch.ops.deepmd.scalarize_losses({'a': x}, None)]\n"
        "x = torch.ones(())\n"
        "for number, call in enumerate(calls):\n"
        "    threading.Thread(target=busy, args=(number, call), daemon=True).start()\n"
        "assert all(s.wait(60) for s in started)"
    ),
    "an atexit function that joins a warming thread": (
        "started = threading.Event()\n"
        "def busy():\n"
        "    try:\n"
        "        while True:\n"
        "            warmup_compiled(task, [torch.ones(2, 3)]); started.set()\n"
        "    except RuntimeError:\n"
        "        pass\n"
        "thread = threading.Thread(target=busy, daemon=True)\n"
        "thread.start()\n"
        "assert started.wait(60)\n"
        "first = thread.join"
    ),
    "a thread that waits for its turn": (
        "inside = threading.Event()\n"
        "def stuck(x):\n"
        "    inside.set(); threading.Event().wait(); return x\n"
        "stuck_task = CompiledTask.from_callable('s', stuck)\n"
        "def warm(t):\n"
        "    warmup_compiled(t, [torch.ones(2, 3)])\n"
        "threading.Thread(target=warm, args=(stuck_task,), daemon=True).start()\n"
        "assert inside.wait(60)\n"
        "threading.Thread(target=warm, args=(task,), daemon=True).start()"
    ),
    "an exception on its way out": (
        "def bad(x): raise ValueError('bad task')\n"
        "sys.excepthook = lambda *a: print('raised', a[1])\n"
        "warmup_compiled(CompiledTask.from_callable('b', bad), [torch.ones(1)])"
    ),
}
EXPECTED = {
    "an atexit function that runs after ours": (
        "closed\nCompiledTask: expected no new handle while the interpreter ends"
    ),
    "an exception on its way out": "raised bad task (while warming task 'b')",
}


@pytest.fixture(scope="module")
def endings(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, subprocess.Popen[str]]:
    assert HOLDER, "build the C++ tests first: make build"
    folder = tmp_path_factory.mktemp("endings")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running: dict[str, subprocess.Popen[str]] = {}
    waiting = list(ENDINGS)
    while waiting:  # two at a time
        pair = [waiting.pop() for _ in range(min(2, len(waiting)))]
        for number, name in enumerate(pair):
            script = folder / f"{len(running)}_{number}.py"
            script.write_text(START + ENDINGS[name])
            running[name] = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", str(script)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        for name in pair:
            try:
                running[name].wait(120)
            except subprocess.TimeoutExpired:
                running[name].kill()
    return running


@pytest.mark.parametrize("holder", ENDINGS)
def test_the_interpreter_ends_while_a_handle_is_held_by(
    holder: str, endings: dict[str, subprocess.Popen[str]]
) -> None:
    process = endings[holder]
    out, err = process.communicate()
    raised = holder == "an exception on its way out"
    assert process.returncode == int(raised), err
    assert out.strip() == EXPECTED.get(holder, ""), err
