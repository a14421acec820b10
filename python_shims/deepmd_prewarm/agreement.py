# SPDX-License-Identifier: LGPL-3.0-or-later
"""A meeting point of all ranks that no collective time-out can end.

Everything here goes over the Store that the process group was made with, and
uses no collective: a rank that compiles for an hour is waited for, a rank that
failed, died or was stopped is named on all the others within seconds. A native
thread beats for this rank from `watch` or its first meeting on.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import _library
from .agreement_by_store import agree_to_degrade, group_name_of, group_over_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = [
    "agree",
    "agree_to_degrade",
    "connect_communicators",
    "entering",
    "group_over_store",
    "rest",
    "sync_ranks",
    "task_fingerprint",
    "together",
    "watch",
    "watch_when_initialized",
]


def sync_ranks(
    group_name: str, phase: str, error: str = "", timeout_s: float = 0.0
) -> None:
    """Meet all ranks of a group: all return, or all raise the same error.

    Blocks without holding the GIL, is no collective, touches no device.
    Ctrl-C ends the wait on this rank, and the other ranks are told.

    Parameters
    ----------
    group_name : str
        ``ProcessGroup.group_name`` of a group of this process.
    phase : str
        What this rank did until now, e.g. the name of its task.
    error : str, optional
        Why this rank cannot go on. Empty: it can.
    timeout_s : float, optional
        Seconds to wait for the other ranks; 0 means no limit.

    Raises
    ------
    RuntimeError
        On every rank, with the same text, if any rank failed: it names each
        failing rank, its phase and its error. Also if the group is unknown or
        its Store no longer answers.
    ValueError
        If `timeout_s` is negative or NaN.
    """
    _library.bridge()  # installs the check that lets Ctrl-C end the wait
    torch.ops.deepmd.sync_ranks(group_name, phase, error, timeout_s)


def agree(
    phase: str,
    error: BaseException | str | None = None,
    group: dist.ProcessGroup | str | None = None,
    *,
    fingerprint: str = "",
    timeout_s: float = 0.0,
) -> None:
    """Meet all ranks after a phase; nobody goes on if it failed anywhere.

    Usable in any trainer, for any phase before training. With one process, or
    before ``init_process_group``, it only raises `error`.

    Parameters
    ----------
    phase : str
        The same name on all ranks, e.g. ``"build data set"``.
    error : BaseException or str, optional
        What went wrong on this rank.
    group : torch.distributed.ProcessGroup or str, optional
        Whom to meet (a group or its name). Default: all ranks.
    fingerprint : str, optional
        Lines that must be the same on all ranks, see `task_fingerprint`.
    timeout_s : float, optional
        Seconds to wait for the other ranks; 0 means no limit.

    Raises
    ------
    BaseException
        `error` itself, with its own traceback, on the rank that brought it
        (a string: as RuntimeError).
    RuntimeError
        On every other rank: each failing rank with phase and text, or the
        first difference between fingerprints or phases.
    """
    name = group_name_of(group)
    if name is None:
        if isinstance(error, BaseException):
            raise error
        if error:
            raise RuntimeError(f"{phase}: {error}")
        return
    expected = f"phase {phase}\n{fingerprint}"
    if not isinstance(error, BaseException):
        _library.bridge().meet(name, phase, error or "", expected, timeout_s)
        return
    # Raised outside of an except block: the verdict is no context of it.
    with contextlib.suppress(RuntimeError):
        _library.bridge().meet(name, phase, _described(error), expected, timeout_s)
    raise error


def watch(group: dist.ProcessGroup | str | None = None) -> bool:
    """Start this rank's heartbeats now, not only at its first meeting.

    So the others notice if it dies or is stopped in a phase before that. Does
    not block; a second call does nothing.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or str, optional
        The group that will meet. Default: all ranks.

    Returns
    -------
    bool
        False where there is nobody to beat for.
    """
    name = group_name_of(group)
    if name is not None:
        _library.bridge().start_beats(name)
    return name is not None


def watch_when_initialized() -> None:
    """Call `watch` as soon as the default process group exists.

    Wraps ``torch.distributed.init_process_group``, once per process; where the
    heartbeats cannot start, they start at the first meeting.
    """
    if not dist.is_available():
        return
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            watch()
        return
    module = dist.distributed_c10d
    original = module.init_process_group
    if getattr(original, "_deepmd_prewarm_watches", False):
        return

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        # No fault of ours may keep a job from starting; it is told later, by
        # whoever needs the library.
        with contextlib.suppress(Exception):
            watch()

    init_process_group._deepmd_prewarm_watches = True  # type: ignore[attr-defined]
    module.init_process_group = init_process_group
    dist.init_process_group = init_process_group


def entering(phase: str) -> None:
    """Say what this process does from now on; its heartbeats carry it.

    Does not block. Errors and warnings of other ranks then name the phase and
    the seconds spent in it.

    Parameters
    ----------
    phase : str
        E.g. ``"compile water"``.
    """
    _library.bridge().enter_phase(phase)


def rest() -> None:
    """Say that training begins: ten times fewer heartbeats until the next meeting.

    Not needed for correctness; it keeps the Store idle in a long training. Does
    nothing where no heartbeats run.
    """
    bridge = sys.modules.get("deepmd_prewarm._bridge")
    if bridge is not None:
        bridge.rest()


class together:  # noqa: N801 - reads as a statement: with together("...")
    """Run a phase on all ranks; leave it together or fail together.

    Parameters
    ----------
    phase : str
        The same name on all ranks.
    group : torch.distributed.ProcessGroup or str, optional
        Whom to meet. Default: all ranks.
    fingerprint : str, optional
        Lines that must be the same on all ranks.

    Examples
    --------
    >>> with together("build data set"):
    ...     data = build()

    An exception inside, KeyboardInterrupt and SystemExit included, is told to
    the other ranks, which raise RuntimeError with its text; here it goes on as
    it is.
    """

    def __init__(
        self,
        phase: str,
        group: dist.ProcessGroup | str | None = None,
        *,
        fingerprint: str = "",
    ) -> None:
        self.phase = phase
        self.group = group
        self.fingerprint = fingerprint

    def __enter__(self) -> together:
        if group_name_of(self.group) is not None:
            entering(self.phase)
            watch(self.group)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            agree(self.phase, None, self.group, fingerprint=self.fingerprint)
            return
        name = group_name_of(self.group)
        if name is None:
            return
        # The exception at hand goes on by itself: a second one, raised here,
        # would only hide where it comes from.
        with contextlib.suppress(RuntimeError):
            _library.bridge().meet(name, self.phase, _described(error), "", 0.0)


def task_fingerprint(tasks: Sequence[str], world_size: int | None = None) -> str:
    """Lines that must be equal on all ranks that warm up the same tasks.

    Parameters
    ----------
    tasks : sequence of str
        Names, in the order in which they are warmed.
    world_size : int, optional
        Number of ranks. Default: that of the default group, or 1.

    Returns
    -------
    str
        Versions, world size, and the tasks with their number, one a line.
    """
    from importlib.metadata import version

    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
    lines = [
        f"deepmd-prewarm {version('deepmd-prewarm')}",
        f"torch {torch.__version__}",
        f"world size {world_size}",
        f"{len(tasks)} tasks",
    ]
    lines += [f"task {i}: {name}" for i, name in enumerate(tasks, 1)]
    return "\n".join(lines)


def connect_communicators(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> bool:
    """Make a group's device communicators now, after all ranks agreed.

    Device backends connect in their first collective. Where a rank died before,
    or one comes minutes later, that is the call that hangs; right after a
    meeting it is not. A collective: all ranks call it. On a group without a
    device backend it does nothing.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Default: all ranks.
    device : torch.device or str, optional
        The device that this rank trains on. Default: the one that the group is
        bound to, else the current one.

    Returns
    -------
    bool
        Whether the group has a device backend.
    """
    name = group_name_of(group)
    if name is None:
        return False
    members = dist.group.WORLD if group is None else group
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type not in {d.type for d in members._device_types}:
        return False
    wanted = torch.device(kind if device is None else device)
    if wanted.type != kind.type or wanted.index is None:
        wanted = members.bound_device_id or torch.device(
            kind.type, torch.accelerator.current_device_index()
        )
    _library.bridge().connect_backend(name, str(wanted))
    # NCCL makes its rings and trees in the first collective, and a backend
    # without an eager way connects in it.
    dist.all_reduce(torch.zeros(1, device=wanted), group=group)
    torch.accelerator.synchronize(wanted)
    return True


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
