# SPDX-License-Identifier: LGPL-3.0-or-later
"""A lost link between hosts is a death on both sides; a slow one is not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from two_hosts import HERE, NotPermitted, RemoteRank, TwoHosts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        made = TwoHosts().__enter__()
    except NotPermitted as why:
        pytest.skip(f"two hosts need namespaces and veth, not permitted here: {why}")
    try:
        yield made
    finally:
        made.__exit__()


def test_a_pulled_cable_is_a_death_on_both_sides(hosts: TwoHosts) -> None:
    a = RemoteRank(hosts.a, 0, hosts.a.address, 0)
    began = a.hear()
    b = RemoteRank(hosts.b, 1, hosts.a.address, began["port"])
    try:
        assert b.hear()["space"] != began["space"]
        for rank in (a, b):
            rank.tell("meet first")
        for rank in (a, b):
            assert rank.hear()["meeting"] == "first"
            assert rank.hear()["raised"] is None
        a.tell("meet second")
        assert a.hear()["meeting"] == "second"
        b.tell("enter compile water")
        pulled = hosts.pull_the_cable()
        b.tell("meet second")
        assert b.hear()["meeting"] == "second"
        here, there = a.hear(), b.hear()
    finally:
        a.end()
        b.end()
    assert "1 of 2 ranks failed" in here["raised"]
    assert "rank 1 in " in here["raised"]
    assert "no heartbeat for" in here["raised"]
    assert "its host or the link to it is down" in here["raised"]
    assert here["at"] - pulled < 8
    assert "the Store of this group must answer" in there["raised"]
    assert 'rank 1 in "second"' in there["raised"]
    assert "No answer for" in there["raised"]
    assert there["at"] - pulled < 12


def test_a_slow_and_lossy_path_is_no_death(hosts: TwoHosts) -> None:
    a = RemoteRank(hosts.a, 0, hosts.a.address, 0)
    port = a.hear()["port"]
    # In b's network, so that what leaves the rank is late already.
    path = hosts.b.start(str(HERE / "slow_path.py"), hosts.a.address, str(port), "0.2")
    assert path.stdout is not None
    b = RemoteRank(hosts.b, 1, "127.0.0.1", int(path.stdout.readline()))
    try:
        b.hear()
        for phase in ("first", "second", "third", "fourth"):
            a.tell(f"meet {phase}")
            assert a.hear()["meeting"] == phase
            b.tell(f"meet {phase}")
            assert b.hear()["meeting"] == phase
            assert a.hear()["raised"] is None
            assert b.hear()["raised"] is None
        # More than two times what silence means death, with rank 1 still busy.
        a.tell("meet fifth")
        assert a.hear()["meeting"] == "fifth"
        time.sleep(12)
        b.tell("meet fifth")
        assert b.hear()["meeting"] == "fifth"
        assert a.hear()["raised"] is None
        assert b.hear()["raised"] is None
    finally:
        for process in (a, b):
            process.end()
        path.kill()
        path.wait()
