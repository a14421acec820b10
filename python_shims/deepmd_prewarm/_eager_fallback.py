# SPDX-License-Identifier: LGPL-3.0-or-later
"""Notice a compiled callable that runs eagerly: the one place that knows how.

Beyond ``recompile_limit`` Dynamo logs one warning, then runs every further
shape and every further instance of that code eagerly and in silence; with
``suppress_errors`` it does so when a compiler fails. A warm-up must not call
that warm. Private names of torch used (2.11, 2.15): the two options, their
exceptions and ``_dynamo.eval_frame._stance``.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch


def call(
    fn: Callable[[], Any], compiled: Callable[[], Iterable[object]]
) -> tuple[Any, str]:
    """Call `fn`, and tell why it ran eagerly.

    Where compiling gives up, `fn` is called again without it, as training will
    run it; only this call is affected, Dynamo keeps no note of it.

    Parameters
    ----------
    fn
        What to call.
    compiled
        Gives the compiled callables that `fn` is known to reach; asked only if
        compiling is switched off.

    Returns
    -------
    tuple
        The result, and the reason; an empty reason: nothing was noticed.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return fn(), ""
    if _is_switched_off(dynamo):
        reason = "torch.compile is switched off (TORCHDYNAMO_DISABLE or force_eager)"
        return fn(), reason if any(True for _ in compiled()) else ""
    # What the user made a hard error stays one.
    given_up: tuple[type[BaseException], ...] = ()
    changes = {}
    if not dynamo.config.fail_on_recompile_limit_hit:
        changes["fail_on_recompile_limit_hit"] = True
        given_up += (dynamo.exc.FailOnRecompileLimitHit,)
    if dynamo.config.suppress_errors:
        changes["suppress_errors"] = False
        given_up += (dynamo.exc.TorchDynamoException,)
    try:
        with dynamo.config.patch(changes):
            return fn(), ""
    except given_up as error:
        if _is_fullgraph(error):
            raise
        reason = _explain(dynamo, error)
    with torch.compiler.set_stance("force_eager"):
        return fn(), reason


def _is_switched_off(dynamo: Any) -> bool:
    return bool(
        dynamo.config.disable or dynamo.eval_frame._stance.stance == "force_eager"
    )


def _is_fullgraph(error: BaseException) -> bool:
    """Whether Dynamo gives up hard here even without our option.

    Its message names our option, which it looks at first; only its own frame
    still knows.
    """
    return any(
        frame.f_code.co_name == "_compile" and frame.f_locals.get("one_graph") is True
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _explain(dynamo: Any, error: BaseException) -> str:
    if isinstance(error, dynamo.exc.FailOnRecompileLimitHit):
        limit = dynamo.config.recompile_limit
        return (
            f"its code was compiled recompile_limit ({limit}) times already, for other "
            "tasks or shapes. Raise torch._dynamo.config.recompile_limit to the number "
            "of tasks times shape classes"
        )
    return f"its compiler failed and suppress_errors hides it: {error}"
