"""What a node answers of its logs, to those who have the token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from medusa_cluster.connections import require_token
from medusa_cluster.node import logs as logs_module
from medusa_cluster.node.logs import Logs

Ask = Callable[[str], Awaitable[tuple[int, Any]]]


def ask_in(folder: Path, asking: Callable[[Ask], Awaitable[None]], token: str = "t") -> None:
    """Serve the logs of a folder while ``asking`` runs; its argument asks for a path: status, and JSON or text."""

    async def run() -> None:
        app = web.Application(middlewares=[require_token("t")])
        app.router.add_routes(Logs(folder).routes())
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:

            async def ask(path: str) -> tuple[int, Any]:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await (answer.json() if answer.status == 200 else answer.text())

            await asking(ask)
        await runner.cleanup()

    asyncio.run(run())


def test_a_log_is_read_to_its_end_and_from_there_on(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text("one\ntwo\n")
    (tmp_path / "lock").touch()

    async def asking(ask: Ask) -> None:
        assert await ask("/logs") == (200, {"ok": {"agent": 8}})
        assert await ask("/logs/agent") == (200, {"ok": {"text": "one\ntwo\n", "start": 0, "end": 8}})
        with log.open("a") as file:
            file.write("thr")
        assert await ask("/logs/agent?after=8") == (200, {"ok": {"text": "thr", "start": 8, "end": 11}})
        assert await ask("/logs/agent?after=11") == (200, {"ok": {"text": "", "start": 11, "end": 11}})
        log.write_text("anew\n")  # as when it was too long
        assert await ask("/logs/agent?after=11") == (200, {"ok": {"text": "anew\n", "start": 0, "end": 5}})

    ask_in(tmp_path, asking)


def test_of_a_long_log_there_are_whole_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "_MOST_BYTES", 10)
    (tmp_path / "agent.log").write_text("one\ntwo\nthree\n")

    async def asking(ask: Ask) -> None:
        assert await ask("/logs/agent") == (200, {"ok": {"text": "three\n", "start": 8, "end": 14}})
        assert await ask("/logs/agent?after=1") == (200, {"ok": {"text": "three\n", "start": 8, "end": 14}})
        assert await ask("/logs/agent?after=8") == (200, {"ok": {"text": "three\n", "start": 8, "end": 14}})

    ask_in(tmp_path, asking)


def test_logs_are_listed_while_others_go(tmp_path: Path) -> None:
    listed = threading.Event()

    def churn() -> None:
        while not listed.is_set():
            for change in (Path.touch, Path.unlink):
                for number in range(50):
                    change(tmp_path / f"instance-{number}.log")

    (tmp_path / "agent.log").write_text("a\n")
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        logs = Logs(tmp_path)
        for _ in range(3000):
            assert logs._sizes()["agent"] == 2
    finally:
        listed.set()
        thread.join()


@pytest.mark.parametrize("path", ["none", "..%2Fsecret", "agent?after=-1", "agent?after=" + "9" * 30, "%00", "."])
def test_nothing_else_is_read(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.log").write_text("secret")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "agent.log").write_text("a\n")

    async def asking(ask: Ask) -> None:
        status, text = await ask("/logs/" + path)
        assert status in (400, 404)
        assert "secret" not in text

    ask_in(tmp_path / "logs", asking)


def test_without_the_token_nothing_is_read(tmp_path: Path) -> None:
    (tmp_path / "agent.log").write_text("a\n")

    async def asking(ask: Ask) -> None:
        for path in ("/logs", "/logs/agent"):
            assert (await ask(path))[0] == 401

    ask_in(tmp_path, asking, token="another")
