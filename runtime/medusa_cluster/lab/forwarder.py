"""A process that passes connections of this machine on into a laboratory.

``python -m medusa_cluster.lab.forwarder LAB SWITCH_PID PORT ADDRESS:PORT`` listens on 127.0.0.1, prints its port, and
connects from the switch's network. It ends with the process LAB.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from . import kernel

_PIECE_BYTES = 256 << 10


def main(arguments: Sequence[str]) -> int:
    lab, switch, port, target = arguments
    laboratory = os.pidfd_open(int(lab))
    try:
        server = socket.create_server(("127.0.0.1", int(port)), backlog=512)
    except OSError as error:
        print(error.strerror, flush=True)
        return 1
    kernel.enter(int(switch), kernel.NEWNET)  # the listening socket stays outside
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(server, laboratory, target))
    return 0


async def _serve(server: socket.socket, laboratory: int, target: str) -> None:
    address, _, port = target.rpartition(":")
    # Once both sides have ended their half, nothing else refers to a connection's task, and it would be collected.
    running: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(address, int(port))
        except OSError:
            writer.transport.abort()  # the client gets a reset
            return
        running.add(task := asyncio.current_task())
        try:
            await asyncio.gather(_pass_on(reader, there_writer), _pass_on(there_reader, writer))
        finally:
            running.discard(task)
            writer.close()
            there_writer.close()

    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(laboratory, ended.set)
    listening = await asyncio.start_server(handle, sock=server)
    print(server.getsockname()[1], flush=True)
    await ended.wait()
    listening.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the reader's side ends, and pass its end or reset on."""
    try:
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
