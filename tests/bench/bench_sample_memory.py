# SPDX-License-Identifier: LGPL-3.0-or-later
"""Trace-time inputs of 64 MB, 1 task and 8: bytes held, and peak resident memory.

Beside the plugin the control without it. Every figure comes from a process of its own;
peaks have the peak of the same job with samples of a few kB taken off, which is what
the tasks' own graphs need. Goals: nothing held, a peak of one sample + 5 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MB = 2**20
KINDS = ("with_plugin", "without_plugin")


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmHWM in /proc/self/status")


def child(kind: str, tasks: int, nbytes: int, backend: str) -> None:
    """Run one job and print what it used."""
    sys.path.insert(0, str(HERE.parent / "python"))
    import sample_job

    seen = getattr(sample_job, kind)(tasks, nbytes, backend)
    print(json.dumps({**seen, "peak": peak_bytes()}))


def measure(kind: str, tasks: int, nbytes: int, backend: str) -> dict:
    """Run one job in a process of its own."""
    print(f"  {kind}, {tasks} tasks, {nbytes} bytes", file=sys.stderr, flush=True)
    arguments = ["--child", kind, "--tasks", str(tasks), "--backend", backend]
    arguments += ["--bytes", str(nbytes)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Print the figures; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=64 * MB)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.tasks, options.bytes, options.backend)
        return 0
    small, missed, losses = 8192, 0, {}
    for kind in options.kinds:
        over = {}
        for tasks in (1, options.tasks):
            large = measure(kind, tasks, options.bytes, options.backend)
            own = measure(kind, tasks, small, options.backend)
            over[tasks] = (large["peak"] - own["peak"]) / options.bytes
            losses.setdefault(tasks, []).append(large["losses"])
        held = max(large["held"]) / options.bytes
        print(
            f"{kind}, {options.tasks} tasks: held after a task's cleanup at most"
            f" {held:.2f} x samples; peak, own graphs taken off: {over[1]:.2f} x"
            f" samples for 1 task, {over[options.tasks]:.2f} x for {options.tasks}",
            flush=True,
        )
        if kind == "with_plugin":
            missed = held > 0 or over[options.tasks] > 1.05
    equal = all(one == kinds[0] for kinds in losses.values() for one in kinds)
    print("losses bitwise equal" if equal else "losses DIFFER")
    return int(missed or not equal)


if __name__ == "__main__":
    sys.exit(main())
