# SPDX-License-Identifier: LGPL-3.0-or-later
"""Field case B8: four ranks as two nodes, one of which is slower than the other."""

from __future__ import annotations

import pytest
from rank_job import Job


@pytest.mark.parametrize(
    "local_ranks",
    [["0", "1", "0", "1"], ["0"] * 4, None],
    ids=["two nodes", "equal on all ranks", "missing"],
)
def test_nobody_passes_before_the_slow_leader_is_done(
    local_ranks: list[str] | None,
) -> None:
    with Job(4, {"gloo": False, "local_ranks": local_ranks}) as job:
        for rank in range(4):
            job.hear(rank, "compiling")
        for rank in (0, 1, 3):
            job.tell(rank, "meet")
        for rank in (0, 1, 3):
            job.hear(rank, "meeting")
        job.tell(2, "sleep 1")
        slow = job.hear(2, "meeting")
        outcomes = [job.outcome(rank) for rank in range(4)]
    assert [said.words for said in outcomes] == [("passed",)] * 4
    assert all(said.at > slow.at for said in outcomes)
