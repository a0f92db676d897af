"""Calls over a Unix socket whose other end breaks off."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from medusa_cluster.json_lines import call


@pytest.mark.parametrize("answer", [b"", b'{"ok": [1, 2', b'{"ok": 1}'])
def test_an_answer_that_breaks_off_is_a_connection_that_ended(tmp_path: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_unix_server(serve, tmp_path / "s"):
            with pytest.raises(ConnectionResetError):
                await call(tmp_path / "s", {})

    asyncio.run(scenario())
