# SPDX-License-Identifier: LGPL-3.0-or-later
"""The way into `rank_program`, for a pytest process that never imports torch."""

from __future__ import annotations

from typing import Any

GROUP_TIMEOUT_S = 2.0
CONNECT_S = 120.0


def host_store(*args: Any) -> None:
    import rank_program

    rank_program.host_store(*args)


def rank_main(*args: Any) -> None:
    import rank_program

    rank_program.rank_main(*args)
