# SPDX-License-Identifier: LGPL-3.0-or-later
"""Agreeing without the library: `agree_to_degrade`, and beats read from Python."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from deepmd_prewarm import _library, agreement, agreement_by_store
from deepmd_prewarm.agreement_by_store import agree_to_degrade, group_name_of
from deepmd_prewarm.signs_of_life import Beat, SignsOfLife, scope_of
from rank_threads import beat_of, make_ranks, on_ranks, wait_for_beat


def _packed(*fields: str) -> bytes:
    return b"".join(b"%d:%s" % (len(f.encode()), f.encode()) for f in fields)


def _record(seq: int = 1, **change: str) -> bytes:
    fields = {
        "format": "1",
        "nonce": "n",
        "seq": str(seq),
        "host": "node7",
        "place": "elsewhere",
        "pid": "41",
        "start": "9",
        "phase": "read dätä",
        "phase_s": "1500",
        "period": "1000",
        "round": "0",
        "adopted": "0",
        "failed": "0",
        "out_of_time": "0",
        "left": "0",
        "dead": "0",
        "fingerprint": "",
        "echo": "",
        "written": "7",
    }
    return _packed(*(fields | change).values())


class Clock:
    """Time that a test plays."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(time, "monotonic", lambda: self.now)

    def watch(self, signs: SignsOfLife, seconds: float) -> str | None:
        """Look once a second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            if why := signs.look(1):
                return why
        return None


class TestAgreeToDegrade:
    def test_says_that_the_plugin_works_everywhere(self) -> None:
        answers: dict[int, Any] = {}

        def body(me: Any) -> None:
            answers[me.rank] = agree_to_degrade(me.name, None)

        assert [r.error for r in on_ranks(make_ranks(4), body)] == [None] * 4
        assert answers == {rank: [] for rank in range(4)}

    def test_tells_all_ranks_where_it_does_not_call_after_call(self) -> None:
        answers: list[Any] = []

        def body(me: Any) -> None:
            for number in range(5):
                bad = number % 3 == me.rank
                text = f"no library\n{number}" if bad else None
                answers.append((number, tuple(agree_to_degrade(me.name, text))))

        store = dist.HashStore()
        raised = on_ranks(make_ranks(3, store), body)
        assert [r.error for r in raised] == [None] * 3
        assert set(answers) == {
            (n, (f"rank {n % 3}: no library\n{n}",)) for n in range(5)
        }
        assert store.num_keys() == 4

    def test_is_not_misled_by_what_an_earlier_attempt_left(self) -> None:
        store = dist.HashStore()
        on_ranks(make_ranks(2, store), lambda me: agree_to_degrade(me.name, "old"))
        answers = []
        ranks = make_ranks(2, store)
        ready = threading.Event()

        def body(me: Any) -> None:
            if me.rank == 0:
                ready.wait(60)  # rank 1 sees the old question and the old verdict
            else:
                threading.Timer(0.3, ready.set).start()
            answers.append(agree_to_degrade(me.name, None))

        assert [r.error for r in on_ranks(ranks, body)] == [None, None]
        assert answers == [[], []]

    def test_waits_for_a_slow_rank_as_long_as_it_beats(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DP_PREWARM_ARRIVE_S", "1")
        monkeypatch.setenv("DP_PREWARM_BEAT_S", "0.2")
        monkeypatch.setenv("DP_PREWARM_DEAD_S", "30")
        ranks = make_ranks(2)
        agreement.watch(ranks[1].name)
        asked = time.monotonic()

        def body(me: Any) -> None:
            if me.rank == 1:
                threading.Event().wait(4.0)
            assert agree_to_degrade(me.name, None) == []

        assert [r.error for r in on_ranks(ranks, body)] == [None, None]
        assert time.monotonic() - asked > 3.9

    def test_gives_up_a_rank_of_which_nothing_was_ever_seen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DP_PREWARM_ARRIVE_S", "1")
        ranks = make_ranks(3)
        raised = on_ranks(
            [ranks[0], ranks[2]], lambda me: agree_to_degrade(me.name, None)
        )
        assert raised[0].text == raised[1].text
        assert "rank 1: no sign of life in 1 s (DP_PREWARM_ARRIVE_S)" in raised[0].text

    def test_gives_up_on_a_rank_0_that_never_comes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DP_PREWARM_ARRIVE_S", "1")
        raised = on_ranks(make_ranks(2)[1:], lambda me: agree_to_degrade(me.name, None))
        assert "rank 0: no sign of life" in raised[0].text


class TestSignsOfLife:
    @pytest.fixture
    def store(self) -> dist.Store:
        return dist.HashStore()

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        return Clock(monkeypatch)

    def _beat(self, store: dist.Store, value: bytes) -> None:
        store.set(f"{scope_of(2)}/beat/1", value)

    def test_of_a_rank_that_beats_never_end(
        self, store: dist.Store, clock: Clock
    ) -> None:
        signs = SignsOfLife(store, 2)
        for number in range(2000):
            self._beat(store, _record(number))
            assert clock.watch(signs, 1) is None

    def test_end_after_five_silent_beats(self, store: dist.Store, clock: Clock) -> None:
        signs = SignsOfLife(store, 2)
        self._beat(store, _record(1))
        clock.watch(signs, 2)
        self._beat(store, _record(2))
        why = clock.watch(signs, 60)
        assert why == (
            'rank 1 in "read dätä" (host node7, pid 41): no heartbeat for 6 s'
        )

    def test_are_waited_for_ten_times_longer_at_rest(
        self, store: dist.Store, clock: Clock
    ) -> None:
        signs = SignsOfLife(store, 2)
        for number in (1, 2):
            self._beat(store, _record(number, period="10000"))
            clock.watch(signs, 1)
        assert clock.watch(signs, 49) is None
        assert clock.watch(signs, 2) is not None

    @pytest.mark.parametrize(
        ("mark", "words"), [("dead", "its process ended"), ("left", "it left")]
    )
    def test_end_at_once_with_a_tombstone_or_a_good_bye(
        self, store: dist.Store, clock: Clock, mark: str, words: str
    ) -> None:
        signs = SignsOfLife(store, 2)
        self._beat(store, _record(1))
        clock.watch(signs, 1)
        self._beat(store, _record(2, **{mark: "1"}))
        assert str(clock.watch(signs, 1)).endswith(words)

    def test_of_an_earlier_job_are_none(self, store: dist.Store, clock: Clock) -> None:
        signs = SignsOfLife(store, 2)
        self._beat(store, _record(1, dead="1"))
        assert clock.watch(signs, 599) is None
        assert "no sign of life in 600 s" in str(clock.watch(signs, 3))

    def test_are_not_missed_while_the_reader_itself_was_stopped(
        self, store: dist.Store, clock: Clock
    ) -> None:
        signs = SignsOfLife(store, 2)
        for number in (1, 2):
            self._beat(store, _record(number))
            clock.watch(signs, 1)
        clock.now += 3600
        assert signs.look(1) is None

    def test_are_what_the_native_thread_writes(self) -> None:
        me = make_ranks(2)[0]
        agreement.watch(me.name)
        agreement.entering("read dätä")
        store = me.group.get_group_store()
        beat = wait_for_beat(store, 0, 2, lambda beat: beat.phase == "read dätä")
        signs = SignsOfLife(store, 2)
        assert beat.place and beat.written_ms >= signs._since_ms
        assert (beat.left, beat.dead, beat.period_s) == (False, False, 1.0)

    @pytest.mark.parametrize(
        "value", [b"", b"no", b"3:ab", b"1:2", _packed("2", "a"), _packed("1", "a")]
    )
    def test_in_another_format_are_none(self, value: bytes) -> None:
        assert Beat.parse(value) is None


def test_a_group_has_a_name_only_where_there_is_somebody_to_meet() -> None:
    pair, alone = make_ranks(2)[0], make_ranks(1)[0]
    assert group_name_of(None) is None
    assert group_name_of(alone.group) is None
    assert group_name_of(pair.name) == pair.name
    assert group_name_of("by name") == "by name"
    assert group_name_of(dist.GroupMember.NON_GROUP_MEMBER) is None


def test_the_answers_in_the_store_are_json_of_a_bounded_size() -> None:
    store = dist.HashStore()
    ranks = make_ranks(2, store)
    on_ranks(ranks, lambda me: agree_to_degrade(me.name, "x" * 10**6))
    answer = json.loads(store.get(f"{scope_of(2)}/degrade/1"))
    assert len(answer["problem"]) == 65536
    _library.bridge()
    assert beat_of(store, 0, 2) is None


class HeldStore:
    """A Store of which one kind of look can be held back until the test says so."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.looks: dict[str, int] = {}
        self.before: dict[tuple[str, int], threading.Event] = {}
        self.after: dict[tuple[str, int], threading.Event] = {}

    def check(self, keys: list[str]) -> bool:
        name = keys[0].rpartition("/")[2]
        number = self.looks[name] = self.looks.get(name, 0) + 1
        if (name, number) in self.before:
            assert self.before[name, number].wait(30)
        found: bool = self._store.check(keys)
        if (name, number) in self.after:
            self.after[name, number].set()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_an_answer_is_never_taken_for_the_next_call() -> None:
    """Rank 0 calls twice while rank 1 still looks for the first verdict."""
    shared = dist.HashStore()
    rank_0, rank_1 = HeldStore(shared), HeldStore(shared)
    looked_in_vain, asked_anew, looked_on = (threading.Event() for _ in range(3))
    rank_0.before["1", 1] = looked_in_vain  # no verdict before rank 1 has looked
    rank_1.after["verdict", 1] = looked_in_vain
    rank_1.before["0", 2] = asked_anew
    rank_0.after["1", 2] = asked_anew
    rank_1.before["0", 3] = looked_on  # its second call
    rank_0.after["1", 4] = looked_on
    answers = [{"nonce": f"call {i}", "problem": f"{i}"} for i in (1, 2)]
    verdicts: list[Any] = []

    def chief() -> None:
        for i in range(2):
            own = {"nonce": f"chief {i}", "problem": ""}
            verdicts.append(agreement_by_store._collect(rank_0, 2, own))

    def other() -> None:
        for answer in answers:
            agreement_by_store._answer(rank_1, 1, 2, answer)

    threads = [threading.Thread(target=one, daemon=True) for one in (chief, other)]
    threads[0].start()
    shared.get(f"{scope_of(2)}/degrade/0")  # blocks until rank 0 asks
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert [one["to"]["1"] for one in verdicts] == ["call 1", "call 2"]
    assert [one["problems"] for one in verdicts] == [["rank 1: 1"], ["rank 1: 2"]]
