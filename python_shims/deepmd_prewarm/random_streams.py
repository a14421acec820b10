# SPDX-License-Identifier: LGPL-3.0-or-later
"""The random streams that a trainer draws from, put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["unchanged_random_streams"]


@contextmanager
def unchanged_random_streams() -> Iterator[None]:
    """Put Python's, NumPy's and torch's global streams back, also on error.

    Generators that a data set owns are its owner's to rewind. A device whose
    context does not exist yet has no stream to put back, and gets none.
    """
    python = random.getstate()
    # A program that never imported NumPy has drawn nothing from it.
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None else None
    host = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(legacy)
        torch.set_rng_state(host)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
