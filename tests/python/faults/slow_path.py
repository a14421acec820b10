# SPDX-License-Identifier: LGPL-3.0-or-later
"""A TCP proxy that delays all it carries: ``slow_path.py TARGET PORT DELAY_S``.

Listens on 127.0.0.1 and prints its port. Each chunk is DELAY_S late in each
direction, and one in twenty another second, as after a lost packet.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys

LOST = 0.05
RETRANSMISSION_S = 1.0


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    clock = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, chunk = await queue.get()
            await asyncio.sleep(max(0.0, due - clock.time()))
            writer.write(chunk)
            await writer.drain()
            if not chunk:
                writer.close()
                return

    delivery = asyncio.create_task(deliver())
    with contextlib.suppress(ConnectionError):
        while True:
            chunk = await reader.read(65536)
            late = RETRANSMISSION_S if random.random() < LOST else 0.0
            await queue.put((clock.time() + delay_s + late, chunk))
            if not chunk:
                break
        await delivery


async def main(host: str, port: int, delay_s: float) -> None:
    """Serve until killed."""

    async def connected(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there, back = await asyncio.open_connection(host, port)
        await asyncio.gather(
            _carry(reader, back, delay_s), _carry(there, writer, delay_s)
        )

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    random.seed(6)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
