"""How long a gateway's clients may take to send the head of a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from medusa_cluster import connections as module
from medusa_cluster.connections import Connections, track_request

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
HEAD = b"GET / HTTP/1.1\r\nHost: g\r\n\r\n"
LIMIT_S = 0.4


def serve(scenario: Callable[[Connect], Awaitable[None]]) -> None:
    """Run a scenario with a server that takes as long for an answer as the query says."""

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(float(request.query.get("s", 0)))
        return web.Response(text="answered")

    async def body() -> None:
        app = web.Application(middlewares=[track_request])
        app.router.add_get("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        connections = Connections(runner.server, LIMIT_S)
        server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)
        looking = asyncio.create_task(connections.run())
        writers = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writers.append(writer)
            return reader, writer

        try:
            await scenario(connect)
        finally:
            for writer in writers:
                writer.close()
            looking.cancel()
            server.close()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_head_that_comes_byte_by_byte_is_given_up() -> None:
    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()

        async def drip() -> None:
            for byte in HEAD * 9:
                writer.write(bytes([byte]))
                await asyncio.sleep(LIMIT_S / 8)

        dripping, answer = asyncio.create_task(drip()), b""
        with contextlib.suppress(ConnectionResetError):  # to a byte that came after the answer
            while piece := await reader.read(4096):
                answer += piece
        dripping.cancel()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert answer.endswith(b'"code":"incomplete_head"}}')

    serve(scenario)


def test_time_is_counted_for_heads_alone() -> None:
    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        await asyncio.sleep(1.5 * LIMIT_S)  # nothing has begun
        for query in (b"?s=0.6", b""):  # one that takes longer to answer than a head may take to come
            writer.write(HEAD.replace(b"/ ", b"/" + query + b" "))
            assert (await reader.readuntil(b"answered")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(1.5 * LIMIT_S)  # nor has the next one
        writer.write(HEAD)
        assert (await reader.readuntil(b"answered")).startswith(b"HTTP/1.1 200")
        writer.write(HEAD[:9])
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")

    serve(scenario)


def test_of_too_many_connections_without_a_request_the_oldest_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 40)

    async def scenario(connect: Connect) -> None:
        made = [await connect() for _ in range(42)]
        assert await made[0][0].read() == b""
        assert await made[1][0].read() == b""
        made[2][1].write(HEAD)
        assert (await made[2][0].readuntil(b"answered")).startswith(b"HTTP/1.1 200")

    serve(scenario)
