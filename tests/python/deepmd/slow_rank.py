# SPDX-License-Identifier: LGPL-3.0-or-later
"""The runner, with one rank that takes 40 s longer to compile its first graph."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from deepmd.pt_expt.train import training
from deepmd_prewarm.deepmd_kit.runner import main

_finalize = training._finalize_compiled_lower
_done: list[int] = []


def slow(*args: Any, **kwargs: Any) -> Any:
    if os.environ["RANK"] == "1" and not _done:
        _done.append(1)
        time.sleep(40.0)  # what is tested: a rank that is slow, not an event
    return _finalize(*args, **kwargs)


if os.environ.get("SLOW", "1") == "1":
    training._finalize_compiled_lower = slow

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
