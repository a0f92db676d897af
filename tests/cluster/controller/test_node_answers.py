"""The controller asks node servers over HTTP. A node may answer anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from medusa_cluster.controller.actor import RayNodes
from medusa_runtime.errors import ClusterError

Ask = Callable[[RayNodes, str], Awaitable[Any]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, Ask], Any]:
    """Ask a node that answers every call with these bytes."""
    (tmp_path / "token").write_text("t" * 32)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_USE_TLS", raising=False)

    def asked(body: bytes, ask: Ask) -> Any:
        async def run() -> Any:
            async def answer(_: web.Request) -> web.Response:
                return web.Response(body=body)

            server = web.ServerRunner(web.Server(answer))  # type: ignore[arg-type]
            await server.setup()
            await web.TCPSite(server, "127.0.0.1", 0).start()
            nodes = RayNodes()
            try:
                return await ask(nodes, f"http://127.0.0.1:{server.addresses[0][1]}")
            finally:
                if nodes._session is not None:
                    await nodes._session.close()
                await server.cleanup()

        return asyncio.run(run())

    return asked


async def listed(nodes: RayNodes, url: str) -> Any:
    return await nodes.logs("a", url, None, None, 10.0)


async def read(nodes: RayNodes, url: str) -> Any:
    return await nodes.logs("a", url, "agent", 8, 10.0)


async def status(nodes: RayNodes, url: str) -> Any:
    return await nodes.status("a", url, 10.0)


def test_logs_of_the_right_form_are_passed_on(asked: Callable[[bytes, Ask], Any]) -> None:
    assert asked(b'{"ok": {"agent": 8}}', listed) == {"agent": 8}
    assert asked(b'{"ok": {"text": "a", "start": 8, "end": 9}}', read) == {"text": "a", "start": 8, "end": 9}


@pytest.mark.parametrize("found", [None, 1, [], {"agent": "8"}, {"agent": None}, {"agent": True}, {"agent": -1}])
def test_a_wrong_list_of_logs_is_an_error(asked: Callable[[bytes, Ask], Any], found: Any) -> None:
    with pytest.raises(ClusterError, match=r"expected the names of logs and their bytes from a, found"):
        asked(json.dumps({"ok": found}).encode(), listed)


@pytest.mark.parametrize(
    "found",
    [
        None,
        1,
        [],
        {},
        {"text": "a"},
        {"text": "a", "end": 1},
        {"text": 1, "start": 0, "end": 1},
        {"text": "a", "start": 0, "end": "9"},
    ],
)
def test_a_wrong_text_of_a_log_is_an_error(asked: Callable[[bytes, Ask], Any], found: Any) -> None:
    with pytest.raises(ClusterError, match=r"expected text, start and end of agent from a, found"):
        asked(json.dumps({"ok": found}).encode(), read)


@pytest.mark.parametrize("ask", [listed, read, status])
@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 200_000, b'"' + b"x" * (17 << 20) + b'"'])
def test_what_is_no_json_or_too_long_is_an_error(asked: Callable[[bytes, Ask], Any], ask: Ask, body: bytes) -> None:
    with pytest.raises(ClusterError, match="did not answer"):
        asked(body, ask)
