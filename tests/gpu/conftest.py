# SPDX-License-Identifier: LGPL-3.0-or-later
"""Figures and outcomes of the tests on a device, collected into one JSON file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

try:
    import torch
except ImportError:  # the script says so
    torch = None  # type: ignore[assignment]

_rows: dict[str, dict[str, Any]] = {}


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Put figures into this test's row of the table."""
    row = _rows.setdefault(request.node.nodeid, {})

    def add(**figures: Any) -> None:
        row.setdefault("figures", {}).update(figures)

    return add


@pytest.fixture
def device() -> Any:
    """Give the one device, with nothing cached on it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.device("cuda", torch.cuda.current_device())


def run_apart(code: str, **environment: str) -> str:
    """Run code in a process of its own, expect success, return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout.strip()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome and the time of each test."""
    if report.when == "call" or report.outcome != "passed":
        row = _rows.setdefault(report.nodeid, {})
        row["outcome"] = report.outcome
        row["seconds"] = round(report.duration, 2)
        if report.outcome != "passed":
            row["why"] = str(report.longrepr)[-400:]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file, also after failures."""
    target = os.environ.get("GPU_JSON")
    if not target:
        return
    machine: dict[str, Any] = {"python": sys.version.split()[0]}
    if torch is not None:
        machine["torch"] = torch.__version__
        if torch.cuda.is_available():
            machine["device"] = torch.cuda.get_device_name()
            machine["devices"] = torch.cuda.device_count()
    Path(target).write_text(
        json.dumps({"machine": machine, "tests": _rows}, indent=1, default=str)
    )
