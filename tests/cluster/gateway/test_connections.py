"""How long a gateway's clients may take to send the head of a request, and how much they may send beside bodies."""

from __future__ import annotations

import asyncio
import contextlib
import time
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

    async def read(request: web.Request) -> web.Response:
        with contextlib.suppress(ConnectionError):
            return web.Response(text=f"answered {len(await request.read())}")
        raise asyncio.CancelledError

    async def body() -> None:
        app = web.Application(middlewares=[track_request])
        app.router.add_get("/", answer)
        app.router.add_post("/", answer)
        app.router.add_post("/read", read)
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


async def exchange(connect: Connect, *pieces: bytes) -> bytes:
    """Send bytes, and return what comes back until the server closes the connection."""
    reader, writer = await connect()
    answer = b""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        while piece := await reader.read(65536):
            answer += piece
    return answer


LONG = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 8000) for number in range(100))
POST = b"POST /read HTTP/1.1\r\nHost: g\r\nConnection: close\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def test_a_large_head_is_refused_before_all_of_it_has_come() -> None:
    """A thousand connections with a megabyte of headers each once took two gigabytes."""

    async def scenario(connect: Connect) -> None:
        for beginning in (HEAD[:-2], b"\r\n\r\n" + HEAD[:-2]):
            answer = await exchange(connect, beginning, LONG[:20_000], LONG[:20_000])
            assert answer.startswith(b"HTTP/1.1 431 "), answer
            assert answer.endswith(b'"code":"bad_http"}}')
            for pieces in ((beginning, LONG), (beginning + LONG,), (beginning + LONG + b"\r\n",)):
                # The connection may be reset before the answer is read, since more is on its way.
                assert await exchange(connect, *pieces) in (b"", answer)
        answer = await exchange(connect, HEAD[:-2] + LONG[:30_000], b"\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")

    serve(scenario)


def test_headers_behind_a_body_and_requests_ahead_of_an_answer_are_bounded() -> None:
    async def scenario(connect: Connect) -> None:
        assert b"answered" not in await exchange(connect, CHUNKED, b"1\r\na\r\n0\r\n", LONG)
        ahead = HEAD.replace(b"/ ", b"/?s=20 ")
        assert b"answered" not in await exchange(connect, ahead, HEAD[:-2] + LONG)

    serve(scenario)


def test_bodies_of_any_size_and_framing_are_taken() -> None:
    async def scenario(connect: Connect) -> None:
        large = bytes(900_000)
        for pieces in (
            (POST + b"Content-Length: 900000\r\n\r\n", large),
            (POST + b"Content-Length: 900000\r\n\r\n" + large,),
            (CHUNKED, b"1\r\na\r\n" * 900_000, b"0\r\n\r\n"),
            (CHUNKED + b"DBBA0\r\n" + large + b"\r\n0\r\n\r\n",),
        ):
            answer = await exchange(connect, *pieces)
            assert answer.endswith(b"answered 900000"), answer
        unread = POST.replace(b"/read", b"/").replace(b"close", b"keep-alive") + b"Content-Length: 900000\r\n\r\n"
        answer = await exchange(connect, unread, *[large[:90_000]] * 10, POST + b"Content-Length: 1\r\n\r\na")
        assert answer.count(b"HTTP/1.1 200 ") == 2, answer
        assert b"431" not in answer

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


@pytest.mark.parametrize("before", [9, len(HEAD)])
def test_the_time_in_which_this_process_stands_still_is_not_the_client_s(before: int) -> None:
    """A process that was stopped, or whose machine was, answers it whether its rest comes meanwhile or later."""

    async def scenario(connect: Connect) -> None:
        for _ in range(5):
            reader, writer = await connect()
            writer.write(HEAD[:5])
            await asyncio.sleep(LIMIT_S / 5)
            writer.write(HEAD[5:before])
            time.sleep(LIMIT_S * 1.5)
            await asyncio.sleep(LIMIT_S / 5)
            writer.write(HEAD[before:])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")

    serve(scenario)
