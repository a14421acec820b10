# SPDX-License-Identifier: LGPL-3.0-or-later
"""Two hosts on one machine: network and process namespaces, joined by a veth.

Their processes cannot watch each other by pidfd, and the cable between them can
be pulled.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

HERE = Path(__file__).parent
PATIENCE_S = 120.0


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class NotPermitted(Exception):
    """This process may not make namespaces, and why."""


class Host:
    """A namespace with an address."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start a process on this host, in its own process namespace."""
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", self.name),
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(sys.executable, *words),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )


class TwoHosts:
    """Hosts ``a`` and ``b``, for the time of a with statement."""

    def __enter__(self) -> TwoHosts:
        for tool in ("ip", "unshare"):
            if shutil.which(tool) is None:
                raise NotPermitted(f"there is no command {tool!r} here")
        mark = f"dp{os.getpid()}"
        self.a = Host(f"{mark}a", "10.213.7.1")
        self.b = Host(f"{mark}b", "10.213.7.2")
        try:
            for host in (self.a, self.b):
                _run("ip", "netns", "add", host.name)
                _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run(
                *("ip", "link", "add", self.a.name, "netns", self.a.name),
                *("type", "veth", "peer", self.b.name, "netns", self.b.name),
            )
            for host in (self.a, self.b):
                device = ("dev", host.name)
                _run(
                    "ip", "-n", host.name, "addr", "add", f"{host.address}/24", *device
                )
                _run("ip", "-n", host.name, "link", "set", host.name, "up")
            _run(
                "ip", "netns", "exec", self.a.name, "unshare", "--pid", "--fork", "true"
            )
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NotPermitted(
                f"{' '.join(error.cmd)}: {error.stderr.strip()}"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        for host in (self.a, self.b):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", host.name)

    def pull_the_cable(self) -> float:
        """Take the link down on both sides; when that was."""
        for host in (self.a, self.b):
            _run("ip", "-n", host.name, "link", "set", host.name, "down")
        return time.monotonic()


class RemoteRank:
    """A rank on a host; it does what its standard input says."""

    def __init__(self, host: Host, rank: int, store: str, port: int) -> None:
        self.process = host.start(
            str(HERE / "host_rank.py"), str(rank), store, str(port)
        )
        self._said: Queue[dict[str, Any] | None] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def hear(self) -> dict[str, Any]:
        """Wait for the next thing it says."""
        said = self._said.get(timeout=PATIENCE_S)
        assert said is not None, "the rank has ended"
        return said

    def tell(self, order: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill it, and all in its process namespace."""
        self.process.kill()
        self.process.wait()
