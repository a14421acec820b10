# SPDX-License-Identifier: LGPL-3.0-or-later
"""How soon a dead, a stopped and a failing rank are named, over 20 runs each.

Three processes, default heartbeats; seconds until the last survivor raised.
Exit code 0 if a dead process is named within 1 s (median) and a stopped one
within 6 s (median) and 8 s (maximum).
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "faults"))
from rank_job import Fault, run_fault

CASES = {
    "killed": (Fault(signals={1: signal.SIGKILL}), 1.0, None),
    "leader killed": (Fault(signals={0: signal.SIGKILL}), 1.0, None),
    "exception": (Fault(orders={1: "raise bad task"}), 1.0, None),
    "stopped": (Fault(signals={1: signal.SIGSTOP}), 6.0, 8.0),
    "leader stopped": (Fault(signals={0: signal.SIGSTOP}), 6.0, 8.0),
}


def main() -> int:
    """Run each case; 0 if all are within their limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    good = True
    for name in options.case or CASES:
        fault, median_limit, worst_limit = CASES[name]
        seconds = []
        for _ in range(options.runs):
            outcome = run_fault(fault, "waiting", gloo=False)
            assert "1 of 3 ranks failed" in outcome.text, outcome.text
            seconds.append(max(outcome.seconds(rank) for rank in outcome.survivors))
        median, worst = statistics.median(seconds), max(seconds)
        fits = median < median_limit and (worst_limit is None or worst < worst_limit)
        good = good and fits
        print(
            f"{name:<15} median {median:.2f} s, maximum {worst:.2f} s"
            f" over {options.runs} runs{'' if fits else '   <-- too late'}",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
