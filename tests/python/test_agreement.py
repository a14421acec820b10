# SPDX-License-Identifier: LGPL-3.0-or-later
"""Meetings: agree, together, sync_ranks; ranks are threads over a real Store.

Field cases D4, D5, D6, D10, D11 and B7; faults of processes are in `faults/`.
"""

from __future__ import annotations

import datetime
import threading
import time
from pathlib import Path
from typing import Any

import deepmd_prewarm
import psutil
import pytest
import torch
import torch.distributed as dist
from deepmd_prewarm import agreement
from rank_threads import beat_of, make_ranks, on_ranks, wait_for_beat

LONG = "Größe 温度 stimmt nicht\nsecond line\n" + "x" * 20000 + "\nthe end"


def _tcp_store(use_libuv: bool) -> dist.Store:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv
    )


@pytest.fixture(params=["hash", "file", "prefix", "tcp", "tcp without libuv"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Give a Store, or a maker of one for each rank."""
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return lambda rank: dist.FileStore(str(tmp_path / "store"), 3)
    if request.param == "prefix":
        return dist.PrefixStore("a/b", dist.PrefixStore("c", dist.HashStore()))
    return _tcp_store(request.param == "tcp")


class TestOverEveryStore:
    def test_rounds_in_a_row_pass_and_fail_independently(self, stores: Any) -> None:
        ranks = make_ranks(3, stores)
        passed = []

        def body(me: Any) -> None:
            for number in range(6):
                bad = me.rank == number % 3 and number in (1, 4)
                try:
                    agreement.agree(f"round {number}", "bad" if bad else None, me.name)
                except RuntimeError as error:
                    assert f'rank {number % 3} in "round {number}"' in str(error)
                    assert number in (1, 4)
                else:
                    passed.append((me.rank, number))

        assert [r.error for r in on_ranks(ranks, body)] == [None] * 3
        assert len(passed) == 3 * 4

    def test_time_outs_and_other_keys_of_the_store_are_as_before(
        self, stores: Any
    ) -> None:
        ranks = make_ranks(2, stores)
        store = ranks[0].group.get_group_store()
        store.set_timeout(datetime.timedelta(seconds=1234))
        store.set("the user's", "7")

        def body(me: Any) -> None:
            agreement.agree("phase", "bad" if me.rank else None, me.name)

        assert "bad" in on_ranks(ranks, body)[0].text
        assert store.timeout == datetime.timedelta(seconds=1234)
        assert store.get("the user's") == b"7"
        assert store.add("a number", 2) == 2


class TestAnErrorOnOneRank:
    def test_goes_on_there_as_the_object_it_is_and_is_told_to_the_others(self) -> None:
        mine = FileNotFoundError(2, "no such data set", "set.000")

        def fail() -> None:
            raise mine

        def body(me: Any) -> None:
            error = None
            if me.rank == 1:
                try:
                    fail()
                except FileNotFoundError as caught:
                    error = caught
            agreement.agree("read data", error, me.name)

        raised = on_ranks(make_ranks(3), body)
        assert raised[1].error is mine
        assert "in fail" in raised[1].trace
        assert mine.__context__ is None and mine.__cause__ is None
        assert raised[0].text == raised[2].text
        assert type(raised[0].error) is RuntimeError
        assert 'rank 1 in "read data"' in raised[0].text
        assert "FileNotFoundError: [Errno 2] no such data set" in raised[0].text

    def test_may_be_a_string_and_is_a_runtime_error_then(self) -> None:
        raised = on_ranks(
            make_ranks(2),
            lambda me: agreement.agree("p", "why not" if me.rank else "", me.name),
        )
        assert {type(r.error) for r in raised} == {RuntimeError}
        assert raised[0].text == raised[1].text
        assert "why not" in raised[0].text

    def test_arrives_whole_however_long_and_foreign(self) -> None:
        raised = on_ranks(
            make_ranks(2),
            lambda me: agreement.agree(
                "é", ValueError(LONG) if me.rank else None, me.name
            ),
        )
        for line in LONG.splitlines():
            assert line in raised[0].text
        assert raised[1].text == LONG

    def test_two_ranks_fail_at_once_and_both_are_listed(self) -> None:
        raised = on_ranks(
            make_ranks(3),
            lambda me: agreement.agree(
                "p", KeyError(f"key {me.rank}") if me.rank else None, me.name
            ),
        )
        assert "2 of 3 ranks failed" in raised[0].text
        assert "'key 1'" in raised[0].text and "'key 2'" in raised[0].text
        assert type(raised[2].error) is KeyError


class TestTogether:
    def test_lets_nobody_leave_before_the_last_one(self) -> None:
        last = threading.Event()
        left = []

        def body(me: Any) -> None:
            with deepmd_prewarm.together("build", me.name):
                if me.rank == 2:
                    last.wait(60)
            left.append(me.rank)

        def open_later() -> None:
            wait_for_beat(store, 0, 3, lambda beat: beat.phase == "build")
            assert left == []
            last.set()

        ranks = make_ranks(3)
        store = ranks[0].group.get_group_store()
        opener = threading.Thread(target=open_later)
        opener.start()
        assert [r.error for r in on_ranks(ranks, body)] == [None] * 3
        opener.join()
        assert sorted(left) == [0, 1, 2]

    @pytest.mark.parametrize(
        "kind", [ValueError, MemoryError, KeyboardInterrupt, SystemExit]
    )
    def test_passes_an_exception_on_and_announces_it(
        self, kind: type[BaseException]
    ) -> None:
        def body(me: Any) -> None:
            with agreement.together("build", me.name):
                if me.rank == 0:
                    raise kind("stop here")

        raised = on_ranks(make_ranks(2), body)
        assert type(raised[0].error) is kind
        assert raised[0].error.__context__ is None
        assert type(raised[1].error) is RuntimeError
        assert f"{kind.__name__}: stop here" in raised[1].text
        assert 'rank 0 in "build"' in raised[1].text

    def test_raises_the_others_error_where_this_rank_has_none(self) -> None:
        def body(me: Any) -> None:
            with agreement.together("build", me.name, fingerprint=f"seed {me.rank}"):
                pass

        raised = on_ranks(make_ranks(2), body)
        assert raised[0].text == raised[1].text
        assert '"seed 1" against "seed 0"' in raised[0].text

    def test_of_one_process_does_nothing(self) -> None:
        with agreement.together("build"):
            pass
        with pytest.raises(ValueError, match="mine"), agreement.together("build"):
            raise ValueError("mine")


class TestWithoutAGroup:
    def test_agree_only_raises_what_it_is_given(self) -> None:
        agreement.agree("phase")
        mine = ValueError("mine")
        with pytest.raises(ValueError) as caught:
            agreement.agree("phase", mine)
        assert caught.value is mine
        with pytest.raises(RuntimeError, match=r"^phase: no data$"):
            agreement.agree("phase", "no data")

    def test_nobody_beats_and_nobody_is_asked(self) -> None:
        assert agreement.watch() is False
        assert agreement.connect_communicators() is False
        assert agreement.agree_to_degrade(None, None) == []
        assert agreement.agree_to_degrade(None, "why") == ["rank 0: why"]

    def test_a_group_of_one_rank_meets_nobody(self) -> None:
        alone = make_ranks(1)[0]
        agreement.agree("phase", None, alone.group)
        assert agreement.watch(alone.group) is False
        with pytest.raises(KeyError):
            agreement.agree("phase", KeyError("mine"), alone.group)


class TestRanksThatDoOtherThings:
    """Field cases A5 and B7: told apart before a collective pairs with another."""

    def test_different_phases_are_named(self) -> None:
        raised = on_ranks(
            make_ranks(3),
            lambda me: agreement.agree(
                "save" if me.rank == 1 else "load", None, me.name
            ),
        )
        assert len({r.text for r in raised}) == 1
        assert '"phase save" against "phase load"' in raised[0].text
        assert 'rank 1 in "save"' in raised[0].text

    def test_the_fingerprint_holds_versions_world_size_and_tasks_in_order(self) -> None:
        lines = agreement.task_fingerprint(["water", "metal"], 4).splitlines()
        assert lines == [
            f"deepmd-prewarm {deepmd_prewarm.__version__}",
            f"torch {torch.__version__}",
            "world size 4",
            "2 tasks",
            "task 1: water",
            "task 2: metal",
        ]

    @pytest.mark.parametrize(
        ("other", "words"),
        [
            (["a", "b"], '"2 tasks" against "3 tasks"'),
            (["a", "c", "b"], '"task 2: c" against "task 2: b"'),
            (["a", "b", "d"], '"task 3: d" against "task 3: c"'),
        ],
        ids=["fewer", "another order", "another name"],
    )
    def test_task_lists_are_compared(self, other: list[str], words: str) -> None:
        def body(me: Any) -> None:
            tasks = other if me.rank == 2 else ["a", "b", "c"]
            print_of = agreement.task_fingerprint(tasks, 3)
            agreement.agree("tasks", None, me.name, fingerprint=print_of)

        raised = on_ranks(make_ranks(3), body)
        assert len({r.text for r in raised}) == 1
        assert words in raised[0].text and "rank 2 in" in raised[0].text


class TestATimeout:
    """Field cases D5 and D10."""

    def test_lists_every_missing_rank_on_every_present_one(self) -> None:
        ranks = make_ranks(5)
        begin = time.monotonic()
        raised = on_ranks(
            [ranks[0], ranks[3], ranks[4]],
            lambda me: agreement.agree("p", None, me.name, timeout_s=1.0),
        )
        assert time.monotonic() - begin > 1.0
        assert len({r.text for r in raised}) == 1
        assert "2 of 5 ranks did not come: rank 1, 2." in raised[0].text

    def test_leaves_the_group_usable(self) -> None:
        ranks = make_ranks(2)
        short = on_ranks(
            ranks[:1], lambda me: agreement.agree("p", None, me.name, timeout_s=0.2)
        )
        assert "1 of 2 ranks did not come: rank 1" in short[0].text
        # The late rank learns of the round that it missed, then all go on.
        late = on_ranks(ranks[1:], lambda me: agreement.agree("p", None, me.name))
        assert late[0].text == short[0].text
        both = on_ranks(ranks, lambda me: agreement.agree("next", None, me.name))
        assert [r.error for r in both] == [None, None]

    @pytest.mark.parametrize("wrong", [-1.0, float("nan")])
    def test_must_be_a_time(self, wrong: float) -> None:
        me = make_ranks(2)[0]
        with pytest.raises(ValueError, match="timeout_s must be a number of seconds"):
            deepmd_prewarm.sync_ranks(me.name, "p", timeout_s=wrong)


class TestSyncRanks:
    def test_needs_a_group_of_this_process(self) -> None:
        with pytest.raises(RuntimeError, match='got "no such group"'):
            deepmd_prewarm.sync_ranks("no such group", "p")

    def test_meets_by_name_and_raises_one_text(self) -> None:
        raised = on_ranks(
            make_ranks(2),
            lambda me: deepmd_prewarm.sync_ranks(
                me.name, f"task {me.rank}", "bad" if me.rank else ""
            ),
        )
        assert raised[0].text == raised[1].text
        assert 'rank 1 in "task 1"' in raised[0].text

    def test_lets_python_threads_run_while_it_waits(self) -> None:
        """Field case D9: the main thread waits in C++, without the GIL."""
        ticks = []
        end = threading.Event()

        def tick() -> None:
            while not end.wait(0.01):
                ticks.append(time.monotonic())

        ticker = threading.Thread(target=tick)
        me = make_ranks(2)[0]
        ticker.start()
        with pytest.raises(RuntimeError, match="did not come"):
            deepmd_prewarm.sync_ranks(me.name, "p", timeout_s=1.0)
        end.set()
        ticker.join()
        assert len(ticks) > 10

    def test_is_one_call_at_a_time_for_each_group(self) -> None:
        ranks = make_ranks(2)
        store = ranks[0].group.get_group_store()
        waiting = threading.Thread(
            target=lambda: on_ranks(
                ranks[:1], lambda me: deepmd_prewarm.sync_ranks(me.name, "first")
            )
        )
        waiting.start()
        wait_for_beat(store, 0, 2, lambda beat: beat.phase == "first")
        with pytest.raises(RuntimeError, match="one call at a time"):
            deepmd_prewarm.sync_ranks(ranks[0].name, "second")
        deepmd_prewarm.sync_ranks(ranks[1].name, "first")
        waiting.join(60)
        assert not waiting.is_alive()


class TestGroups:
    def test_over_one_store_do_not_disturb_each_other(self) -> None:
        store = dist.HashStore()
        world = make_ranks(4, store)
        low = make_ranks(2, dist.PrefixStore("low", store))
        high = make_ranks(2, dist.PrefixStore("high", store))

        def body(me: Any) -> None:
            agreement.agree("world", None, me.name)
            half = (low if me.rank < 2 else high)[me.rank % 2]
            try:
                agreement.agree("half", "bad" if me.rank == 3 else None, half.name)
            except RuntimeError as error:
                assert me.rank >= 2 and "bad" in str(error)
            else:
                assert me.rank < 2
            agreement.agree("world again", None, me.name)

        assert [r.text for r in on_ranks(world, body)] == [""] * 4

    def test_made_again_over_the_same_store_start_anew(self) -> None:
        store = dist.HashStore()
        for _ in range(4):
            ranks = make_ranks(3, store)
            raised = on_ranks(
                ranks,
                lambda me: (
                    agreement.agree("p", None, me.name),
                    agreement.agree("p", "bad" if me.rank else None, me.name),
                ),
            )
            assert "2 of 3 ranks failed" in raised[0].text

    def test_leave_a_bounded_number_of_keys(self) -> None:
        store = dist.HashStore()
        ranks = make_ranks(3, store)
        agreement._library.bridge()

        def body(me: Any) -> None:
            for _ in range(40):
                agreement.agree("p", None, me.name)

        on_ranks(ranks, body)
        # Old verdicts go with the leader's next beat.
        wait_for_beat(store, 0, 3, lambda beat: beat.phase == "after p")
        agreement.entering("on")
        on_ranks(ranks, lambda me: agreement.agree("p", None, me.name))
        assert store.num_keys() <= 3 + 3 + 2 + 45

    def test_over_a_store_of_ones_own_need_no_process_group(self) -> None:
        """Field case D11: before any group exists, no collective, no device."""
        store = dist.HashStore()
        assert not dist.is_initialized()
        name = agreement.group_over_store(store, 0, 2, "mine")
        other = make_ranks(2, dist.PrefixStore("deepmd_prewarm_group/mine", store))[1]

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a collective was entered")

        with pytest.MonkeyPatch.context() as patch:
            for collective in ("barrier", "all_reduce", "broadcast", "all_gather"):
                patch.setattr(dist, collective, refuse)
                patch.setattr(dist.distributed_c10d, collective, refuse)
            raised = on_ranks(
                [other, make_ranks(1)[0]],
                lambda me: agreement.agree("p", None, me.name if me is other else name),
            )
        assert [r.error for r in raised] == [None, None]
        assert not torch.cuda.is_initialized()


def test_meeting_opens_no_listening_port() -> None:
    """Field case D4: the job's own Store is used, there is no service of ours."""

    def listening() -> set[Any]:
        found = psutil.Process().net_connections(kind="all")
        return {c.laddr for c in found if c.status == psutil.CONN_LISTEN}

    store = _tcp_store(use_libuv=True)
    before = listening()
    ranks = make_ranks(2, store)
    on_ranks(ranks, lambda me: agreement.agree("p", None, me.name))
    assert before and listening() == before


class TestHeartbeats:
    def test_start_without_a_meeting_and_carry_the_phase(self) -> None:
        ranks = make_ranks(2)
        store = ranks[0].group.get_group_store()
        assert beat_of(store, 0, 2) is None
        assert agreement.watch(ranks[0].name) is True
        agreement.entering("read data")
        beat = wait_for_beat(store, 0, 2, lambda beat: beat.phase == "read data")
        assert beat.period_s == 1.0
        assert beat_of(store, 1, 2) is None

    def test_are_ten_times_rarer_at_rest_until_the_next_phase(self) -> None:
        me = make_ranks(2)[0]
        store = me.group.get_group_store()
        agreement.watch(me.name)
        agreement.entering("training")
        agreement.rest()
        wait_for_beat(store, 0, 2, lambda beat: beat.period_s == 10.0)
        agreement.entering("save")
        wait_for_beat(store, 0, 2, lambda beat: beat.period_s == 1.0)

    def test_go_on_while_the_main_thread_waits_in_the_store(self) -> None:
        """Field case D9: a connection of our own, so no request queues up."""
        store = _tcp_store(use_libuv=True)
        other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        me = make_ranks(2, store)[0]
        agreement.watch(me.name)
        wait_for_beat(other, 0, 2, lambda beat: True)
        ages: list[float] = []

        def look() -> None:
            values = [None, None]
            changed = time.monotonic()
            while len(ages) < 3:
                values = [values[1], other.get("deepmd_prewarm//2/beat/0")]
                if values[0] != values[1]:
                    ages.append(time.monotonic() - changed)
                    changed = time.monotonic()
                threading.Event().wait(0.05)
            other.set("enough", "")

        looker = threading.Thread(target=look)
        looker.start()
        store.wait(["enough"], datetime.timedelta(seconds=60))
        looker.join()
        assert len(ages) == 3
