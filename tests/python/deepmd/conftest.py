# SPDX-License-Identifier: LGPL-3.0-or-later
"""Trainings that the trainer tests look at: each runs once, many tests read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # fresh_process
_PATIENCE_S = 1500


@dataclass(frozen=True)
class Run:
    """What one training left behind."""

    folder: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        path = self.folder / "facts.json"
        assert path.is_file(), f"{self.folder.name} did not run; see its log"
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts

    @cached_property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "prewarm.json").read_text())
        return report

    @property
    def lcurve(self) -> str:
        return (self.folder / "lcurve.out").read_text()

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.ckpt*.pt"))

    def tensors(self, checkpoint: str) -> dict[str, Any]:
        """Every tensor and number of a checkpoint by its path."""
        import torch

        content = torch.load(self.folder / checkpoint, weights_only=True)
        return dict(_leaves(content, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{path}/{number}")
    else:
        yield path, value


def environment(**more: str) -> dict[str, str]:
    """One thread, one compile cache for all runs, no probing of the CPU."""
    cache = HERE.parents[2] / "build" / "trainer-cache"
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("DP_PREWARM_TEST_CACHE", str(cache)),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Decoder processes would each import deepmd-kit.
        "DP_LMDB_NUM_WORKERS": "1",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def start(command: Sequence[str], log: Path, **more: str) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to a log."""
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(**more),
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        cwd=log.parent,
    )


def finish(process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait for a process; show the end of its log if it failed."""
    try:
        code = process.wait(_PATIENCE_S)
    finally:
        process.kill()
    if code:
        print(log.read_text()[-6000:])
    return code


@pytest.fixture(scope="session")
def trainer_data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Data sets of the trainer tests, written once."""
    import trainer_inputs

    return trainer_inputs.Data(tmp_path_factory.mktemp("trainer-data"))
