# SPDX-License-Identifier: LGPL-3.0-or-later
"""Run every benchmark of this folder, one after the other (`make bench`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run each bench_*.py; return the number that failed."""
    failed = 0
    for script in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"== {script.name}", flush=True)
        failed += subprocess.call([sys.executable, str(script)]) != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
