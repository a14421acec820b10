# SPDX-License-Identifier: LGPL-3.0-or-later
"""Start deepmd-kit's pt_expt training on hosts where its own start-up cannot.

    python -m torch.distributed.run --nproc-per-node N \
        -m deepmd_prewarm.deepmd_kit.runner INPUT.json [--report DIR] [options]

deepmd-kit makes the group `cuda:nccl,cpu:gloo`, which fails on a host without a
GPU. It takes a group that is there already, so this module makes a gloo group where
no device is, and leaves hosts with a GPU to deepmd-kit. The hooks come through the
entry point, as in every other training.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepmd_prewarm.deepmd_kit.runner", description=__doc__
    )
    parser.add_argument("input", metavar="INPUT.json", help="deepmd-kit input file")
    parser.add_argument("--report", metavar="DIR", help="folder for prewarm.json")
    parser.add_argument("--restart", "-r", metavar="CHECKPOINT")
    parser.add_argument("--init-model", "-i", metavar="CHECKPOINT")
    parser.add_argument("--finetune", "-t", metavar="CHECKPOINT")
    parser.add_argument("--model-branch", default="", metavar="NAME")
    parser.add_argument("--use-pretrain-script", action="store_true")
    parser.add_argument("--skip-neighbor-stat", action="store_true")
    parser.add_argument("--output", "-o", default="out.json", metavar="FILE")
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed every random stream with N + rank (deepmd-kit's pt_expt seeds "
        "neither its task choice nor its batches)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="time-out of the gloo group made here",
    )
    return parser


def _make_group(timeout_s: float | None) -> bool:
    """Make the gloo group if torchrun started us and there is no GPU."""
    import torch
    import torch.distributed as dist

    if "LOCAL_RANK" not in os.environ or dist.is_initialized():
        return False
    if torch.cuda.is_available() and timeout_s is None:
        return False
    limit = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend=backend, timeout=limit)
    return True


def _seed_all(seed: int) -> None:
    """Seed every stream that training draws from."""
    import numpy as np
    import torch
    from deepmd.utils import random as dp_random

    seed += int(os.environ.get("RANK", "0"))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    dp_random.seed(seed % 2**32)
    torch.manual_seed(seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as `dp --pt-expt train` does, under torchrun or alone.

    Parameters
    ----------
    argv
        Command line without the program's name; that of the process by default.

    Returns
    -------
    int
        0. Errors of the training propagate.
    """
    options = _parser().parse_args(argv)
    if options.report is not None:
        os.environ["DP_PREWARM_REPORT"] = str(Path(options.report).resolve())

    from deepmd.loggers.loggers import set_log_handles

    set_log_handles(int(os.environ.get("DP_LOG_LEVEL", logging.INFO)), None)

    owner = _make_group(options.timeout)
    # Imported after the group exists: deepmd-kit then takes it over.
    from deepmd.pt_expt.entrypoints.main import train

    if options.seed is not None:
        _seed_all(options.seed)
    try:
        train(
            input_file=options.input,
            init_model=options.init_model,
            restart=options.restart,
            finetune=options.finetune,
            model_branch=options.model_branch,
            use_pretrain_script=options.use_pretrain_script,
            skip_neighbor_stat=options.skip_neighbor_stat,
            output=options.output,
        )
    finally:
        if owner:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
