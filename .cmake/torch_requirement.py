# SPDX-License-Identifier: LGPL-3.0-or-later
"""Metadata provider: a wheel requires the torch that it was built for.

A C++ library fits one torch series only. The source distribution stays open.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any


class Requirement:
    """Adds ``torch==X.Y.*`` to the dependencies that pyproject.toml lists."""

    def build_state(self, build_state: str) -> None:
        """Remember what is built: an sdist or a wheel."""
        self._is_sdist = build_state == "sdist"

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the dependencies."""
        series = ".".join(version("torch").split(".")[:2])
        torch = "torch>=2.11" if self._is_sdist else f"torch=={series}.*"
        return {"dependencies": [torch, *settings["dependencies"]]}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        """Tell that a wheel's dependencies differ from the sdist's."""
        return {"dependencies": True}
