# SPDX-License-Identifier: LGPL-3.0-or-later
"""Look through all Python objects of this process."""

from __future__ import annotations

import gc
from typing import Any

__all__ = ["instances_of"]


def instances_of(*kinds: type) -> list[Any]:
    """List what is alive of some classes and their subclasses.

    Costs a pass over everything the garbage collector tracks.

    Parameters
    ----------
    kinds
        Classes.

    Returns
    -------
    list
        Objects, in no order; the list keeps them alive.
    """
    # By type, not isinstance: a dead weak proxy raises when asked for its class.
    return [one for one in gc.get_objects() if issubclass(type(one), kinds)]
