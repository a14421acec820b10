# SPDX-License-Identifier: LGPL-3.0-or-later
"""Run a piece of code in a fresh process that has torch imported, quickly.

A fork server imports torch once; what loads the library, crashes or leaves
torch changed runs in a fork of it, in milliseconds instead of seconds.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path


@dataclass
class Done:
    """How a fresh process ended; a negative code is a signal."""

    returncode: int
    stdout: str
    stderr: str


@functools.cache
def context() -> ForkServerContext:
    """Give the fork server that has torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "fresh_process"])
    return context


def _child(code: str, folder: str, environment: dict[str, str]) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    os.environ.update(environment)
    file_name = f"{folder}/fresh.py"  # TorchScript reads the source again
    Path(file_name).write_text(code)
    try:
        exec(compile(code, file_name, "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)
    finally:
        sys.stdout.flush()


def run(code: str, *, timeout_s: float = 300, **environment: object) -> Done:
    """Run `code` with these environment variables; never raises for its fate."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {name: str(value) for name, value in environment.items()}
        process = context().Process(target=_child, args=(code, folder, variables))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        read = [
            file.read_text() if (file := Path(folder, name)).exists() else ""
            for name in ("stdout", "stderr")
        ]
        assert process.exitcode is not None
        return Done(process.exitcode, *read)


def output(code: str, **environment: object) -> str:
    """Run `code`, expect success, return what it printed."""
    done = run(code, **environment)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    return done.stdout.strip()


def in_fresh_process(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test where torch's process-wide settings are torch's own.

    deepmd-kit raises Dynamo's recompile limit and switches donated buffers off for
    the whole process, and Dynamo's caches remember other tests.
    """
    file = Path(inspect.getfile(test))

    @functools.wraps(test)
    def run_apart() -> None:
        output(
            f"import sys\nsys.path.insert(0, {str(file.parent)!r})\n"
            f"import {file.stem}\n{file.stem}.{test.__name__}.__wrapped__()\n"
        )

    return run_apart
