# SPDX-License-Identifier: LGPL-3.0-or-later
"""The seed case: one rank compiles for longer than the process group waits.

Two ranks, gloo, time-out 15 s; the compiler takes 40 s longer on rank 1.
Without prewarming rank 0 waits for rank 1 in the first collective and the job is
killed (the control must show that); with it both train. Exit code 0 if both did
what they should.
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import subprocess
import sys
import threading
import time

STEPS = 3


def train(timeout_s: float, delay_s: float, prewarmed: bool) -> None:
    """Be one rank: three tasks, DDP, compiled by a compiler slow on rank 1."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    slow = threading.Event()  # never set: waiting for it is the slow compiler

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        if rank == 1 and not compiled:
            compiled.append(True)
            slow.wait(delay_s)
        return graph.forward

    class Model(torch.nn.Module):
        # Dynamo would leave a bare torch.nn.Linear below DDP alone.
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x))

    compiled: list[bool] = []
    names = ("Cu", "Ag", "Al")
    torch.manual_seed(0)
    models = {
        name: torch.compile(DistributedDataParallel(Model()), backend=compiler)
        for name in names
    }
    if prewarmed:
        from deepmd_prewarm import prewarm

        report = prewarm(
            {name: (model, [torch.randn(8, 4)]) for name, model in models.items()}
        )
        watch = report.watch()
    for step in range(STEPS):
        for model in models.values():
            torch.manual_seed(100 * step + rank)
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
    if prewarmed:
        after = watch.finish()
        if rank == 0:
            waited = sum(task.wait_s for task in report.ranks[0].tasks)
            print(f"rank 0 waited {waited:.1f} s; compiled after step 1: {after}")
            assert after == 0
    dist.destroy_process_group()


def run(timeout_s: float, delay_s: float, prewarmed: bool) -> tuple[list[int], str]:
    """Start both ranks; exit codes, and what rank 0 said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--rank", "--timeout", str(timeout_s)]
    command += ["--delay", str(delay_s), *(["--prewarmed"] if prewarmed else [])]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
            },
        )
        for rank in range(2)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said[0]


def main() -> int:
    """Run control and prewarmed job; 0 if they did what they should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=15.0, help="group, seconds")
    parser.add_argument("--delay", type=float, default=40.0, help="rank 1, seconds")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--prewarmed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(options.timeout, options.delay, options.prewarmed)
        return 0
    print(
        f"time-out of the group {options.timeout:g} s, rank 1 compiles"
        f" {options.delay:g} s longer"
    )
    good = True
    for prewarmed in (False, True):
        begin = time.monotonic()
        codes, said = run(options.timeout, options.delay, prewarmed)
        seconds = time.monotonic() - begin
        last = said.strip().splitlines()[-1] if said.strip() else ""
        expected = (codes == [0, 0]) if prewarmed else (codes[0] != 0)
        good = good and expected
        print(
            f"{'with prewarm' if prewarmed else 'control':<13} exit codes {codes}"
            f" after {seconds:5.1f} s: {last[:160]}"
            f"{'' if expected else '   <-- NOT what it should be'}"
        )
        if not expected:
            print(said)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
