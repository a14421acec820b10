# SPDX-License-Identifier: LGPL-3.0-or-later
"""Fixtures: nothing compiled before, in memory or on disk, reaches a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from counted_calls import counted_calls


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    # Effect registration is not part of the cache key: never a used folder.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    # Else six subprocesses that import torch, to ask for CPU features.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        yield


@pytest.fixture
def calls(fresh_compiler: None) -> Iterator[list[str]]:
    """Names of the operators that really ran, in order."""
    with counted_calls() as names:
        yield names
