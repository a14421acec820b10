# SPDX-License-Identifier: LGPL-3.0-or-later
"""Field case E12: Inductor starts compile workers while heartbeats run."""

from __future__ import annotations

import fresh_process
import pytest
from test_agreement_processes import MEET_TWICE

CODE = (
    MEET_TWICE
    + """
import torch, torch._inductor.config as config
from torch._inductor.async_compile import AsyncCompile
from deepmd_prewarm import CompiledTask, warmup_compiled

config.cpp.vec_isa_ok = True
config.compile_threads = 4
config.worker_start_method = os.environ["START"]

def loss(x):
    return (x * 2 + 1).sum()

task = CompiledTask.from_callable("task", torch.compile(loss))
warmup_compiled(task, [torch.ones(8, requires_grad=True)])
assert task.is_warm() and task.stats()["eager_runs"] == 0
pool = AsyncCompile.process_pool()
workers = {pool.submit(os.getpid).result() for _ in range(4)}
assert workers and os.getpid() not in workers

loader = torch.utils.data.DataLoader(
    torch.arange(8.0), num_workers=2, multiprocessing_context="fork"
)
assert sum(float(x) for x in loader) == 28.0

beat = beat_of(store, 0, 2)
assert beat.pid == str(os.getpid()), (beat, workers)
assert [r.error for r in on_ranks(ranks, meet)] == [None, None]
print("met again")
"""
)


@pytest.mark.parametrize("start", ["fork", "subprocess"])
def test_compile_workers_and_data_loaders_leave_the_meeting_alone(
    start: str, tmp_path: object
) -> None:
    done = fresh_process.run(
        CODE,
        START=start,
        TORCHINDUCTOR_CACHE_DIR=tmp_path,
        TORCHINDUCTOR_COMPILE_THREADS=4,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "met again\n"
