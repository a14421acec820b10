# SPDX-License-Identifier: LGPL-3.0-or-later
"""Copies of the operator library for tests: hard, linked, of another version."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import deepmd_prewarm
import pytest
from deepmd_prewarm import _library

LIBRARY = deepmd_prewarm.library_path()
VERSION = deepmd_prewarm.__version__
#: As tests/cpp/CMakeLists.txt builds it.
OTHER_VERSION = "9.8.9"


def built(name: str) -> Path:
    """Find a library in the build tree of the running torch."""
    tree = Path(__file__).parents[2] / "build"
    torch = _library.read_stamp(LIBRARY).torch
    for path in tree.glob(f"torch-*/{name}/{LIBRARY.name}"):
        if _library.read_stamp(path).torch == torch:
            return path
    raise FileNotFoundError(f"{tree}: no {name} for torch {torch}: run `make build`")


def make_copies(folder: Path) -> dict[str, Path]:
    """Make every way in which a library is in a file system twice."""
    ways = {name: folder / name / LIBRARY.name for name in ("link", "copy")}
    for way in ways.values():
        way.parent.mkdir()
    ways["link"].symlink_to(LIBRARY)
    shutil.copy(LIBRARY, ways["copy"])
    return {**ways, "other": built("tests/other"), "same": LIBRARY}


def needs_deepmd_kit() -> None:
    """Skip a test where deepmd-kit is not installed."""
    # tests/python/deepmd is found too, as a namespace.
    if getattr(find_spec("deepmd"), "origin", None) is None:
        pytest.skip("no deepmd-kit here: 3.2.0 pins torch 2.11")
