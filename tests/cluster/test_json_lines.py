"""Calls over a Unix socket whose other end breaks off."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from medusa_cluster.json_lines import JsonLinesServer, call


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


def test_files_that_others_make_meanwhile_have_the_usual_mode(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def answer(_: object) -> None:
            pass

        async def make() -> None:
            (tmp_path / "folder").mkdir(mode=0o700)

        server = JsonLinesServer(tmp_path / "s", answer)
        await asyncio.gather(server.start(), make())
        assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        await server.close()
        assert not (tmp_path / "s").exists()

    asyncio.run(scenario())
