"""Connections that are passed on into a laboratory."""

from __future__ import annotations

import asyncio
import gc
import os
import socket

import pytest
from medusa_cluster.lab import forwarder


def test_a_client_that_has_ended_its_half_gets_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of the loop refers to a connection that waits for the other side's end alone."""
    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"question"
        asked.set()
        await asyncio.sleep(0.3)
        writer.write(b"answer")
        writer.close()

    async def ask() -> bytes:
        target = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = target.sockets[0].getsockname()[1]
        laboratory = os.pidfd_open(os.getpid())
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(forwarder._serve(listener, laboratory, f"127.0.0.1:{port}"))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"question")
        writer.write_eof()
        await asked.wait()
        await asyncio.sleep(0.05)
        gc.collect()
        try:
            return await asyncio.wait_for(reader.read(), 5)
        finally:
            listener.close()
            serving.cancel()
            writer.close()
            target.close()
            await asyncio.gather(serving, return_exceptions=True)
            os.close(laboratory)

    assert asyncio.run(ask()) == b"answer"
