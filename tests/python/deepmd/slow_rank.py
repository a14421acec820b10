# SPDX-License-Identifier: LGPL-3.0-or-later
"""The runner, with a rank 1 that is 40 s later than rank 0 in its first task."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from deepmd.pt_expt.train import training
from deepmd_prewarm.deepmd_kit.runner import main

_forward = training._CompiledModel.forward
_rank_0_is_here = Path("rank0-is-here")
_done: list[int] = []


def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
    result = _forward(self, *args, **kwargs)
    _done.append(1)
    if len(_done) == 2:  # both shape classes of the first task, forward
        if os.environ["RANK"] == "0":
            _rank_0_is_here.touch()
        else:
            # Counted from where rank 0 is: a busy machine makes it late too.
            while not _rank_0_is_here.exists():
                time.sleep(0.1)
            time.sleep(40.0)  # what is tested: a rank that is slow, not an event
    return result


if os.environ.get("SLOW", "1") == "1":
    training._CompiledModel.forward = slow

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
