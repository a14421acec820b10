# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a `CompiledTask` handle is while a graph is traced: a name.

Imported by `deepmd_prewarm._library.load`, after the class exists.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch


class FakeTask:
    """Stands for a handle in Dynamo, AOTAutograd and export."""

    def __init__(self, name: str, backend: str) -> None:
        self._name = name
        self._backend = backend

    @classmethod
    def __obj_unflatten__(cls, flat: Sequence[tuple[str, str]]) -> FakeTask:
        """Make one from what ``CompiledTask.__obj_flatten__`` tells."""
        return cls(**dict(flat))

    def name(self) -> str:
        """Return the task's name."""
        return self._name

    def backend(self) -> str:
        """Return the kind of callable."""
        return self._backend

    def is_warm(self) -> bool:
        """Return False: nothing runs while tracing."""
        return False

    def stats(self) -> dict[str, float]:
        """Return nothing: nothing runs while tracing."""
        return {}

    def close(self) -> None:
        """Leave the real handle open."""


def _expected_copy_failure(record: logging.LogRecord) -> bool:
    """Drop torch's warning that a handle is shared with the traced graph.

    It is meant to be: compiled code belongs to its process and cannot be
    copied, and a traced warm-up must warm the caller's own callable.
    """
    text = record.getMessage()
    return not (
        text.startswith("Unable to deepcopy the custom object")
        and "classes.deepmd.CompiledTask" in text
    )


def _show_one_overload(packet: torch._ops.OpOverloadPacket) -> None:
    """Let Dynamo take the default overload of an operator with a handle.

    Between several it chooses in C++, which knows no fake handle and fails. The
    default one takes every list that the others take; they stay callable.
    """
    if "_overload_names" not in vars(packet):
        raise ImportError(
            "deepmd-prewarm: expected torch._ops.OpOverloadPacket._overload_names, "
            f"got torch {torch.__version__} without. Install a deepmd-prewarm made "
            "for this torch."
        )
    packet._overload_names = [""]


torch._library.register_fake_class("deepmd::CompiledTask", FakeTask)
_show_one_overload(torch.ops.deepmd.warmup_compiled)
logging.getLogger("torch._library.fake_class_registry").addFilter(
    _expected_copy_failure
)
