# SPDX-License-Identifier: LGPL-3.0-or-later
"""Make ``is_shared()`` of a released tensor raise instead of ending the process.

``THPStorage_isShared`` (torch 2.11, ``StorageSharing.cpp``) reads the data pointer
without the translation of C++ errors that every other method has, so the named
error of a released storage would reach ``std::terminate``. Imported by
`deepmd_prewarm._library.load`.
"""

from __future__ import annotations

from typing import Any

import torch

_is_shared = torch.UntypedStorage.is_shared


def _readable_is_shared(storage: Any) -> bool:
    """Check if storage is in shared memory."""
    if storage.device.type == "cpu" and storage.nbytes():
        storage[0]  # raises by name if the storage was released
    return bool(_is_shared(storage))


torch.UntypedStorage.is_shared = _readable_is_shared
