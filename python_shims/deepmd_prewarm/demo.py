# SPDX-License-Identifier: LGPL-3.0-or-later
"""The demo: a real 3-task deepmd-kit training on 2 ranks, prewarmed."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from .cli import run_training

__all__ = ["run_demo"]

_STEPS = 40


def run_demo(folder: Path, nproc: int) -> int:
    """Make data with ase's EMT and train on it.

    Parameters
    ----------
    folder
        Where data, training and report go; an earlier run in it is replaced.
    nproc
        Number of ranks.

    Returns
    -------
    int
        Exit code of the training.
    """
    from .deepmd_kit.demo_data import demo_input

    training = (folder / "training").resolve()
    shutil.rmtree(training, ignore_errors=True)
    for name in ("prewarm.json", "prewarm.png"):
        (folder / name).unlink(missing_ok=True)
    click.echo("[1/2] energies and forces of three metals (ase, EMT)")
    source = demo_input(training, steps=_STEPS)
    click.echo(f"[2/2] {nproc} ranks, 3 tasks, {_STEPS} steps in {training}")
    # deepmd-kit leaves out.json and input_v2_compat.json where it runs.
    return run_training(
        source, nproc, folder.resolve(), ("--seed", "1"), folder=training
    )
