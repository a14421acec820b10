# SPDX-License-Identifier: LGPL-3.0-or-later
"""Faults of the plugin itself: told once, never the end of a training.

An error of the user's model, data or compiler does not pass through here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["degrade", "guarded", "is_strict", "log"]

#: Below deepmd-kit's logger, so that lines look like its own.
log = logging.getLogger("deepmd.prewarm")

_told: set[str] = set()


def is_strict() -> bool:
    """Whether faults of the plugin are errors.

    Returns
    -------
    bool
        True if `DP_PREWARM_STRICT` is set, and not to 0.
    """
    return os.environ.get("DP_PREWARM_STRICT", "") not in ("", "0")


def degrade(problems: Sequence[str], *, tell: bool = True) -> None:
    """Go on without prewarming, on all ranks.

    Parameters
    ----------
    problems
        What keeps the plugin from working, one per rank that has a problem.
    tell
        Whether this rank writes the warning.

    Raises
    ------
    RuntimeError
        Instead, if faults are errors.
    """
    text = (
        "deepmd-prewarm cannot work here, training goes on without it on all ranks ("
        + "; ".join(problems)
        + "). DP_PREWARM_STRICT=1 makes this an error, DP_PREWARM=0 switches"
        " prewarming off."
    )
    if is_strict():
        raise RuntimeError(text)
    if tell:
        log.warning(text)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn a fault of the plugin into one warning.

    Only for what training does not depend on: watching, counting, logging.

    Parameters
    ----------
    what
        What was being done, for the warning.
    """
    try:
        yield
    except Exception as error:
        if is_strict():
            raise
        if what not in _told:
            _told.add(what)
            log.warning(
                "deepmd-prewarm: %s failed and is left out (%s: %s). Training is"
                " unchanged; please report this.",
                what,
                type(error).__name__,
                error,
            )
