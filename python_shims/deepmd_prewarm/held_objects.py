# SPDX-License-Identifier: LGPL-3.0-or-later
"""A line of an audit: what one holder keeps alive. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

__all__ = ["Held", "Kind", "largest"]

Kind = Literal["tensor", "fake tensor", "graph", "shape environment"]


class Held(BaseModel):
    """Objects of one kind that one holder keeps alive."""

    kind: Kind
    #: who: "module Linear.weight", "graph metadata: val", "list", "frame of f", ...
    holder: str
    device: str = ""
    count: int = 0
    #: of storages that nothing older had, each counted once, bytes
    nbytes: int = 0


def largest(held: Sequence[Held], limit: int) -> list[Held]:
    """Keep the first groups and add up the rest, for each kind and device.

    Parameters
    ----------
    held
        Groups, the largest first.
    limit
        How many to keep.

    Returns
    -------
    list of Held
        At most `limit` groups, and one called ``"others"`` for each kind and device.
    """
    kept = list(held[:limit])
    others: dict[tuple[Kind, str], Held] = {}
    for one in held[limit:]:
        rest = others.setdefault(
            (one.kind, one.device),
            Held(kind=one.kind, holder="others", device=one.device),
        )
        rest.count += one.count
        rest.nbytes += one.nbytes
    return kept + list(others.values())
