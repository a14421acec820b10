# SPDX-License-Identifier: LGPL-3.0-or-later
"""Meetings and the life of a process: start, fork, exit, death before a meeting.

Field cases D7, D8 and E12; what survivors raise in a fault is in `faults/`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fresh_process
import pytest

BEGIN = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch.distributed as dist
from deepmd_prewarm import _library, agreement
from rank_threads import beat_of, make_ranks, on_ranks, wait_for_beat
"""
MEET_TWICE = (
    BEGIN
    + """
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
ranks = make_ranks(2, store)
meet = lambda me: agreement.agree("p", None, me.name)
assert [r.error for r in on_ranks(ranks, meet)] == [None, None]
"""
)


def _both(*codes: str, **environment: object) -> list[fresh_process.Done]:
    """Run rank 0, rank 1, ... as processes of their own, at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(len(codes)) as pool:
        runs = [
            pool.submit(
                fresh_process.run, BEGIN + code, PORT=port, RANK=rank, **environment
            )
            for rank, code in enumerate(codes)
        ]
        return [run.result() for run in runs]


OWN_GROUP = """
rank, port = int(os.environ["RANK"]), int(os.environ["PORT"])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
group = agreement.group_over_store(store, rank, 2, "pair")
"""


class TestAForkedChild:
    def test_is_refused_a_meeting_and_does_not_beat(self) -> None:
        done = fresh_process.run(
            MEET_TWICE
            + """
child = os.fork()
if child == 0:
    try:
        agreement.agree("in the child", None, ranks[0].name)
    except RuntimeError as error:
        print(error)
    assert agreement.watch(ranks[0].name)
    agreement.entering("child's phase")
    agreement.rest()
    sys.stdout.flush()
    sys.exit(5)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5
beat = beat_of(store, 0, 2)
assert (beat.pid, beat.phase, beat.left) == (str(os.getpid()), "after p", False), beat
assert [r.error for r in on_ranks(ranks, meet)] == [None, None]
"""
        )
        assert done.returncode == 0, done.stderr
        assert "must be called in the process that made the group" in done.stdout
        assert "got a call in its forked child" in done.stdout

    def test_may_meet_over_a_group_of_its_own(self) -> None:
        done = fresh_process.run(
            MEET_TWICE
            + """
child = os.fork()
if child == 0:
    mine = make_ranks(2)
    raised = on_ranks(mine, lambda me: agreement.agree("q", "bad", me.name))
    os._exit(0 if "2 of 2 ranks failed" in raised[0].text else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
"""
        )
        assert done.returncode == 0, done.stderr

    def test_of_a_data_loader_leaves_the_meeting_alone(self) -> None:
        done = fresh_process.run(
            MEET_TWICE
            + """
import torch
data = torch.arange(8.0)
loader = torch.utils.data.DataLoader(
    data, num_workers=2, multiprocessing_context="fork"
)
assert sum(float(x) for x in loader) == 28.0
assert beat_of(store, 0, 2).pid == str(os.getpid())
assert [r.error for r in on_ranks(ranks, meet)] == [None, None]
"""
        )
        assert done.returncode == 0, done.stderr


ENDINGS = {
    "the end of the script": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "an exception": ("raise ValueError('mine')", 1),
    "a signal": (
        "os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait()",
        -signal.SIGTERM,
    ),
    "a thread that waits in a meeting": (
        "waiting = threading.Thread(target=meet, args=(ranks[0],), daemon=True)\n"
        "waiting.start()\n"
        "wait_for_beat(store, 0, 2, lambda beat: beat.phase == 'p')",
        0,
    ),
    "a dead Store": ("del meet, ranks, store", 0),
    "a group that was given up": ("ranks.clear(); agreement.rest()", 0),
}


def _interpreter(code: str, **environment: object) -> subprocess.Popen[str]:
    """Start a whole interpreter: what a fork server makes runs no atexit."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
    )


@pytest.fixture(scope="module")
def endings() -> dict[str, subprocess.Popen[str]]:
    return {
        name: _interpreter(MEET_TWICE + code) for name, (code, _) in ENDINGS.items()
    }


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_as_it_wants_to_without_a_hang_or_a_core(
    ending: str, endings: dict[str, subprocess.Popen[str]]
) -> None:
    _, errors = endings[ending].communicate(timeout=300)
    assert endings[ending].returncode == ENDINGS[ending][1], errors
    for word in ("terminate called", "Fatal Python error", "core dumped"):
        assert word not in errors


def test_a_good_bye_is_said_at_exit_and_named_to_who_waits() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    met = BEGIN + OWN_GROUP + 'agreement.agree("first", group=group)'
    waits = """
try:
    agreement.agree("second", group=group)
except RuntimeError as error:
    print(error)
"""
    first = _interpreter(met + waits, PORT=port, RANK=0)
    second = _interpreter(met, PORT=port, RANK=1)
    said, errors = first.communicate(timeout=300)
    second.communicate(timeout=300)
    assert (first.returncode, second.returncode) == (0, 0), errors
    assert 'rank 1 in "after first"' in said
    assert "it left: its process exits or gave this process group up" in said


@pytest.mark.parametrize("time", range(3))
def test_rank_0_may_leave_first_though_it_hosts_the_store(time: int) -> None:
    """Field case D8."""
    done = _both(
        *2 * [OWN_GROUP + 'agreement.agree("only", group=group); print("passed")']
    )
    assert [d.returncode for d in done] == [0, 0], done[1].stderr
    assert [d.stdout for d in done] == ["passed\n"] * 2


def test_ranks_need_no_folder_in_common(tmp_path: Path) -> None:
    """Field case D7: another home, temporary folder and working directory."""
    code = f"""
home = os.path.join({str(tmp_path)!r}, os.environ["RANK"])
os.makedirs(home)
os.environ.update(HOME=home, TMPDIR=home)
os.chdir(home)
{OWN_GROUP}
for phase in ("read", "compile", "train"):
    with agreement.together(phase, group):
        pass
print("passed", os.listdir("."))
"""
    done = _both(code, code)
    assert [d.stdout for d in done] == ["passed []\n"] * 2, done[0].stderr


def test_a_neighbour_that_dies_before_it_met_anybody_is_named() -> None:
    """Not only after DP_PREWARM_ARRIVE_S: rank 0 is the first it could follow."""
    first, second = _both(
        OWN_GROUP
        + """
there = sys.modules["deepmd_prewarm.agreement_by_store"]._groups["pair"]
beat = wait_for_beat(there.get_group_store(), 1, 2, lambda beat: True)
while os.path.exists(f"/proc/{beat.pid}"):
    time.sleep(0.01)
try:
    agreement.agree("train", group=group)
except RuntimeError as error:
    print(error)
""",
        OWN_GROUP
        + """
agreement.entering("read data")
agreement.watch(group)
there = sys.modules["deepmd_prewarm.agreement_by_store"]._groups["pair"]
wait_for_beat(there.get_group_store(), 1, 2, lambda beat: True)
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 0, first.stderr
    assert 'rank 1 in "read data"' in first.stdout
    assert "its process ended" in first.stdout


FAKE_GROUP = """
import torch.testing._internal.distributed.fake_pg
def init():
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
"""


class TestWatchWhenInitialized:
    def test_starts_the_beats_with_the_group(self) -> None:
        fresh_process.output(
            BEGIN
            + FAKE_GROUP
            + """
agreement.watch_when_initialized()
agreement.watch_when_initialized()
assert "deepmd_prewarm._bridge" not in sys.modules
init()
store = dist.group.WORLD.get_group_store()
assert wait_for_beat(store, 0, 2, lambda beat: True).pid == str(os.getpid())
assert dist.init_process_group.__name__ == "init_process_group"
"""
        )

    def test_starts_them_at_once_where_the_group_exists(self) -> None:
        fresh_process.output(
            BEGIN
            + FAKE_GROUP
            + """
init()
agreement.watch_when_initialized()
store = dist.group.WORLD.get_group_store()
wait_for_beat(store, 0, 2, lambda beat: True)
"""
        )

    def test_never_keeps_a_group_from_being_made(self) -> None:
        fresh_process.output(
            BEGIN
            + FAKE_GROUP
            + """
agreement.watch_when_initialized()
init()
assert dist.get_world_size() == 2
dist.destroy_process_group()
agreement.watch_when_initialized()
""",
            DP_PREWARM_LIBRARY="/nowhere/libdeepmd_prewarm.so",
        )

    def test_is_called_by_the_hook_of_deepmd_kit(self, tmp_path: Path) -> None:
        package = tmp_path / "deepmd" / "pt_expt" / "train"
        package.mkdir(parents=True)
        for folder in (package, package.parent, package.parent.parent):
            (folder / "__init__.py").touch()
        (package / "training.py").write_text("class Trainer: pass\n")
        fresh_process.output(
            BEGIN
            + FAKE_GROUP
            + f"""
sys.path.insert(0, {str(tmp_path)!r})
import deepmd_prewarm.deepmd_kit.entry
from deepmd_prewarm.deepmd_kit import trainer
trainer.install = lambda module: None
import deepmd.pt_expt.train.training
init()
wait_for_beat(dist.group.WORLD.get_group_store(), 0, 2, lambda beat: True)
"""
        )


SLOW = """
import logging
lines = []
there = threading.Event()
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
        if len(lines) == 2:
            there.set()
logging.getLogger("deepmd_prewarm").addHandler(Keep())
ranks = make_ranks(2)
def body(me):
    agreement.agree("first", None, me.name)
    if me.rank == 1:
        there.wait(float(os.environ.get("LATE_S", 60)))
    agreement.agree("second", None, me.name)
raised = on_ranks(ranks, body)
print(*lines, *(r.text for r in raised), sep="\\n")
"""


def test_a_slow_rank_is_logged_at_doubling_intervals_and_waited_for() -> None:
    said = fresh_process.output(
        BEGIN + SLOW, DP_PREWARM_SLOW_S="0.4", DP_PREWARM_BEAT_S="0.1"
    )
    lines = [line for line in said.splitlines() if line]
    assert len(lines) >= 2
    for line in lines:
        assert "alive but slow, the other ranks wait for rank 1 in " in line


def test_a_slow_rank_is_an_error_after_the_longest_time_that_was_set() -> None:
    said = fresh_process.output(
        BEGIN + SLOW, DP_PREWARM_MAX_S="0.5", DP_PREWARM_BEAT_S="0.1", LATE_S="2"
    )
    assert "1 of 2 ranks failed" in said
    assert "it took longer than 0.50 s (DP_PREWARM_MAX_S)" in said
