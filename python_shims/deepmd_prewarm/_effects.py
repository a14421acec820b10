# SPDX-License-Identifier: LGPL-3.0-or-later
"""Tell the compilers that a call acts even if nobody uses its result.

FX dead-code removal, AOTAutograd, Inductor and ``run_decompositions`` keep a
call, and keep it in program order, if its operator has an ORDERED effect. The
API is private in torch: this file is the only one that knows it.
Imported by `deepmd_prewarm._library.load`, after the fakes.
"""

from __future__ import annotations

import torch

from deepmd_prewarm._operators import ACTING

#: To be changed with what is registered here.
_CACHE_KEY_TAG = "deepmd_prewarm effects 1"


def _register() -> None:
    try:
        from torch._library.effects import EffectType

        register = torch.library._register_effectful_op
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "deepmd-prewarm: expected torch.library._register_effectful_op and "
            f"torch._library.effects.EffectType, got torch {torch.__version__} "
            f"without ({error}). Without it torch.compile deletes calls: install "
            "a deepmd-prewarm made for this torch."
        ) from error
    for operator in ACTING:
        register(operator, EffectType.ORDERED)
        # torch.fx.symbolic_trace records the name without its overload.
        torch.fx.node.has_side_effect(operator.overloadpacket)
    # torch's compile caches do not ask for effects: a graph from a process that had
    # registered none would be taken from the disk, without its calls.
    config = torch.compiler.config
    if _CACHE_KEY_TAG not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {_CACHE_KEY_TAG}".strip()


_register()
