# SPDX-License-Identifier: LGPL-3.0-or-later
"""Two live ranks that run one case of `rank_cases` after another.

One pair serves a whole test module: torch is imported once, and every case also
proves that the group is usable after the case before it.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_ANSWER = "ANSWER "
_PATIENCE_S = 300.0


class RankPair:
    """Processes of a gloo group over a TCPStore, waiting for cases."""

    def __init__(self, size: int = 2, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[str | None]] = []
        for rank in range(size):
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("rank_cases.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    **environment,
                },
            )
            answers: queue.Queue[str | None] = queue.Queue()
            threading.Thread(
                target=self._listen, args=(process, answers), daemon=True
            ).start()
            self.processes.append(process)
            self._answers.append(answers)

    @staticmethod
    def _listen(
        process: subprocess.Popen[str], answers: queue.Queue[str | None]
    ) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_ANSWER):
                answers.put(line[len(_ANSWER) :])
        answers.put(None)

    def run(self, case: str, **arguments: Any) -> list[dict[str, Any]]:
        """Run a case on all ranks; what each answered, in rank order."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([case, arguments]) + "\n")
            process.stdin.flush()
        results = []
        for rank, answers in enumerate(self._answers):
            line = answers.get(timeout=_PATIENCE_S)
            assert line is not None, f"rank {rank} died in {case}"
            result = json.loads(line)
            assert "broken" not in result, f"rank {rank}: {result['broken']}"
            results.append(result)
        return results

    def close(self) -> list[int]:
        """Let the ranks go; their exit codes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        return [process.wait(timeout=_PATIENCE_S) for process in self.processes]


def serve(cases: dict[str, Any]) -> None:
    """Answer cases from stdin until it closes; the main of a rank."""
    import traceback

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    # Six tasks of one class with two shapes each are more than the default, 8.
    torch._dynamo.config.recompile_limit = 64
    for line in sys.stdin:
        name, arguments = json.loads(line)
        torch._dynamo.reset()
        try:
            answer = cases[name](dist.get_rank(), **arguments)
        except BaseException:
            answer = {"broken": traceback.format_exc()}
        print(_ANSWER + json.dumps(answer), flush=True)
    dist.destroy_process_group()
