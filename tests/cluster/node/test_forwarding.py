"""A node server's listener before a real HTTP server that stands for an instance."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from medusa_cluster.deployment import Deployment
from medusa_cluster.json_lines import JsonLinesServer
from medusa_cluster.node import http_server as http_server_module
from medusa_cluster.node.conflicts import check_name
from medusa_cluster.node.controller_client import ControllerClient
from medusa_cluster.node.forwarding import Forwarder
from medusa_cluster.node.http_server import NodeHttpServer
from medusa_cluster.node.instances import Instances, RunningInstance
from medusa_cluster.node.processes.child import Child
from medusa_cluster.node.settings import NodeServerSettings
from medusa_runtime.errors import ConfigError, NoControllerError, UnauthorizedError, UnknownNameError

from benchmarks.ports import free_port

TOKEN = "0123456789abcdef"
Scenario = Callable[[aiohttp.ClientSession, str, "Upstream"], Awaitable[None]]


class Upstream:
    """What stands for `medusa serve`: it shows what it was sent, streams, and hangs."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.received = asyncio.Event()
        self.go_on = asyncio.Event()
        self.instances: Instances | None = None  # of the node
        self.app = web.Application(client_max_size=1 << 30)
        self.app.router.add_route("*", "/echo", self.echo)
        self.app.router.add_get("/stream", self.stream)
        self.app.router.add_post("/upload", self.upload)
        self.app.router.add_get("/broken", self.broken)

    async def echo(self, request: web.Request) -> web.Response:
        body = await request.text()
        found = {"method": request.method, "path": request.raw_path, "headers": dict(request.headers), "body": body}
        return web.json_response(found, status=418, headers={"X-Answer": "yes", "Connection": "X-Gone", "X-Gone": "1"})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        await response.write(b"data: 2\n\n")
        return response

    async def upload(self, request: web.Request) -> web.Response:
        await request.content.readany()
        self.received.set()
        rest = await request.content.read()
        return web.json_response({"rest": len(rest)})

    async def broken(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport
        request.transport.abort()
        return response


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[int]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield port
    await runner.cleanup()


def run(folder: Path, scenario: Scenario, *, head_url: str | None = None) -> None:
    async def body() -> None:
        (folder / "logs").mkdir()
        token_file = folder / "token"
        token_file.touch(0o600)
        token_file.write_text(TOKEN)
        settings = NodeServerSettings("n1", folder, "127.0.0.1", token_file, data_port=free_port(), head_url=head_url)
        instances, upstream = Instances(settings), Upstream()
        line = ControllerClient(settings, settings.access())
        listener = NodeHttpServer(settings, settings.access(), Forwarder(instances), line, ())
        async with serving(upstream.app) as port:
            for name, where in (("i1", port), ("ended", free_port())):
                listening = asyncio.get_running_loop().create_future()
                listening.set_result(where)
                instances.add(RunningInstance(name, Deployment("m", "/m"), "secret", listening, state="ready"))
            await listener.start()
            upstream.instances = instances
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                await asyncio.wait_for(scenario(session, settings.url, upstream), 30)
            await listener.close()
            await line.close()
            await instances.end(0.0)

    asyncio.run(body())


def test_a_request_and_its_answer_pass_through_unchanged(tmp_path: Path) -> None:
    async def scenario(session: aiohttp.ClientSession, url: str, _: Upstream) -> None:
        sent = {"X-Mine": "a", "Connection": "X-Hop", "X-Hop": "1"}
        async with session.put(f"{url}/instances/i1/echo?a=%20b&c", data="body", headers=sent) as answer:
            found = await answer.json()
            assert (answer.status, answer.headers["X-Answer"]) == (418, "yes")
            assert "X-Gone" not in answer.headers
        assert (found["method"], found["path"], found["body"]) == ("PUT", "/echo?a=%20b&c", "body")
        assert found["headers"]["X-Mine"] == "a"
        assert "X-Hop" not in found["headers"]
        assert found["headers"]["Authorization"] == "Bearer secret"  # the instance's own, not the cluster's

    run(tmp_path, scenario)


def test_a_compressed_body_has_no_more_bytes_than_were_announced(tmp_path: Path) -> None:
    """Behind those, an instance would look for the next request, perhaps of another caller."""

    async def scenario(session: aiohttp.ClientSession, url: str, _: Upstream) -> None:
        headers = {"Content-Encoding": "gzip"}
        for _ in range(2):
            async with session.put(
                f"{url}/instances/i1/echo", data=gzip.compress(b"a" * 9000), headers=headers
            ) as answer:
                assert (await answer.json())["body"] == "a" * 9000

    run(tmp_path, scenario)


def test_a_target_in_absolute_form_is_that_of_its_path(tmp_path: Path) -> None:
    """RFC 9112 §3.2.2: a server has to accept it, though only requests to proxies use it."""

    async def scenario(_: aiohttp.ClientSession, url: str, __: Upstream) -> None:
        address = url.removeprefix("http://")
        for origin in (url, "HTTP://elsewhere"):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            head = f"GET {origin}/instances/i1/echo?a=%20b HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
            writer.write(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["path"] == "/echo?a=%20b"

    run(tmp_path, scenario)


def test_a_stream_is_passed_on_as_it_comes(tmp_path: Path) -> None:
    async def scenario(session: aiohttp.ClientSession, url: str, upstream: Upstream) -> None:
        async with session.get(f"{url}/instances/i1/stream") as answer:
            assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
            upstream.go_on.set()
            assert await answer.content.read() == b"data: 2\n\n"

    run(tmp_path, scenario)


def test_a_caller_that_goes_cancels_the_request(tmp_path: Path) -> None:
    async def scenario(session: aiohttp.ClientSession, url: str, upstream: Upstream) -> None:
        answer = await session.get(f"{url}/instances/i1/stream")
        await answer.content.readuntil(b"\n\n")
        answer.close()
        await upstream.cancelled.wait()

    run(tmp_path, scenario)


def test_a_caller_that_goes_as_a_piece_comes_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(session: aiohttp.ClientSession, url: str, upstream: Upstream) -> None:
        for turns in range(8):  # of the event loop, until the node has both in one of them
            upstream.go_on.clear()
            answer = await session.get(f"{url}/instances/i1/stream")
            await answer.content.readuntil(b"\n\n")
            assert answer.connection is not None
            transport = answer.connection.transport
            assert transport is not None
            upstream.go_on.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            transport.abort()
            await asyncio.sleep(0.05)

    run(tmp_path, scenario)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_body_is_passed_on_as_it_comes(tmp_path: Path) -> None:
    async def scenario(session: aiohttp.ClientSession, url: str, upstream: Upstream) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"x" * 10
            await upstream.received.wait()  # the first piece, before the last one is sent
            yield b"y" * (5 << 20)

        async with session.post(f"{url}/instances/i1/upload", data=pieces()) as answer:
            assert await answer.json() == {"rest": 5 << 20}

    run(tmp_path, scenario)


def test_an_answer_that_breaks_off_is_seen_to_be_incomplete(tmp_path: Path) -> None:
    async def scenario(session: aiohttp.ClientSession, url: str, _: Upstream) -> None:
        async with session.get(f"{url}/instances/i1/broken") as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()

    run(tmp_path, scenario)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    async def scenario(session: aiohttp.ClientSession, url: str, _: Upstream) -> None:
        async with session.get(f"{url}/instances/nothing/echo") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "Cluster.NoInstance")
        async with session.post(f"{url}/cluster/status", json={}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "Cluster.NoController")
        for body in (
            "{",
            "[]",
            "[" * 100_000,
            '{"at": ' + "9" * 5000 + "}",
            "\udcff".encode("utf-8", "surrogateescape"),
        ):
            async with session.post(f"{url}/cluster/status", data=body) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, "Config.Invalid")

    run(tmp_path, scenario)


def test_without_the_token_there_is_only_a_sign_of_life(tmp_path: Path) -> None:
    async def scenario(_: aiohttp.ClientSession, url: str, __: Upstream) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer wrong"}) as session:
            for path in ("/instances/i1/echo", "/cluster/status", "/nothing"):
                async with session.post(url + path) as answer:
                    assert answer.status == 401
            async with session.get(f"{url}/healthz") as answer:
                assert await answer.json() == {"name": "n1"}

    run(tmp_path, scenario)


def test_an_instance_that_has_ended_gives_404(tmp_path: Path) -> None:
    async def scenario(session: aiohttp.ClientSession, url: str, _: Upstream) -> None:
        async with session.get(f"{url}/instances/ended/echo") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "Cluster.NoInstance")

    run(tmp_path, scenario)


def test_an_instance_gets_requests_while_it_drains_but_not_once_it_ends(tmp_path: Path) -> None:
    """An ending instance would break such a request off, and a gateway would count the instance as lost."""

    async def scenario(session: aiohttp.ClientSession, url: str, upstream: Upstream) -> None:
        assert upstream.instances
        instance = upstream.instances.get("i1")
        assert instance
        takes_long = ["sh", "-c", "trap 'sleep 3; exit' TERM; echo; while :; do sleep 0.1; done"]
        started = asyncio.Event()
        instance.child = Child(takes_long, dict(os.environ), Path("/dev/null"), lambda _: started.set())
        await started.wait()
        async with session.get(f"{url}/instances/i1/stream") as answer:
            await answer.content.readany()
            stop = asyncio.create_task(upstream.instances.stop("i1", 30.0))
            await asyncio.sleep(0.2)
            async with session.post(f"{url}/instances/i1/echo") as other:
                assert other.status == 418
            upstream.go_on.set()
            assert await answer.content.read() == b"data: 2\n\n"
        while not instance.ending:
            await asyncio.sleep(0.01)
        async with session.post(f"{url}/instances/i1/echo") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "Cluster.NoInstance")
        assert not stop.done()
        assert await stop

    run(tmp_path, scenario)


def test_an_instance_that_could_not_have_its_model_says_which_node_lacks_what(tmp_path: Path) -> None:
    async def scenario(session: aiohttp.ClientSession, url: str, upstream: Upstream) -> None:
        assert upstream.instances
        deployment = Deployment("m", str(tmp_path / "missing"), settings={"state": "none"})
        await upstream.instances.start("lacking", deployment)
        message = ""
        while "lacking ended by itself on the node n1" not in message:  # on a busy machine, it may still be ending
            async with session.post(f"{url}/instances/lacking/v1/completions", json={"prompt": "a"}) as answer:
                error = (await answer.json())["error"]
                assert answer.status in (404, 502) or error["code"] == "not_ready"
                message = error["message"]
        assert f"{tmp_path}/missing: expected a folder with a checkpoint" in message

    run(tmp_path, scenario)


def test_the_controllers_answers_come_through_any_node(tmp_path: Path) -> None:
    async def answer(request: dict[str, object]) -> object:
        if request["op"] == "remove":
            raise UnknownNameError("no such model")
        return request

    async def scenario(session: aiohttp.ClientSession, url: str, _: Upstream) -> None:
        controller = JsonLinesServer(tmp_path / "controller.sock", answer)  # type: ignore[arg-type]
        await controller.start()
        elsewhere = NodeServerSettings("n2", tmp_path, "127.0.0.1", tmp_path / "token", head_url=url)
        line = ControllerClient(elsewhere, elsewhere.access())
        assert await line.call("scale", {"name": "m"}) == {"op": "scale", "arguments": {"name": "m"}}
        with pytest.raises(UnknownNameError, match="no such model"):
            await line.call("remove", {})
        assert (await line.call("join", {}))["head"] == "n1"
        await controller.close()
        with pytest.raises(NoControllerError):
            await line.call("status", {})
        await line.close()
        (tmp_path / "other").touch(0o600)
        (tmp_path / "other").write_text("x" * 16)
        stranger = NodeServerSettings("n3", tmp_path, "127.0.0.1", tmp_path / "other", head_url=url)
        line = ControllerClient(stranger, stranger.access())
        with pytest.raises(UnauthorizedError, match="refused the token"):
            await line.call("status", {})
        await line.close()

    run(tmp_path, scenario)


def test_a_node_is_refused_the_name_of_another_one_that_answers(tmp_path: Path) -> None:
    """Two machines made from one image have one hostname, and so one name."""
    nodes = [{"name": "n1", "address": ""}, {"name": "gone", "address": f"127.0.0.1:{free_port()}"}]

    async def answer(_: dict[str, object]) -> object:
        return {"nodes": nodes}

    async def scenario(_: aiohttp.ClientSession, url: str, __: Upstream) -> None:
        nodes[0]["address"] = url.removeprefix("http://")
        controller = JsonLinesServer(tmp_path / "controller.sock", answer)
        for away in (True, False):
            if not away:
                await controller.start()
            for name in ("n1", "gone", "n2"):
                settings = NodeServerSettings(
                    name, tmp_path, "127.0.0.2", tmp_path / "token", data_port=free_port(), head_url=url
                )
                line = ControllerClient(settings, settings.access())
                if name == "n1" and not away:
                    with pytest.raises(ConfigError, match=f"another node .* is called n1, at {nodes[0]['address']}"):
                        await check_name(settings, line)
                else:
                    await check_name(settings, line)
                await line.close()
        await controller.close()

    run(tmp_path, scenario)


def test_heads_of_strangers_that_never_end_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server_module, "_HEAD_S", 0.4)

    async def scenario(session: aiohttp.ClientSession, url: str, _: Upstream) -> None:
        host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        for _, writer in opened:
            writer.write(b"GET /instances/qwen-1/echo HTTP/1.1\r\nHost: n\r\nX-Slow: ")
        answers = [await asyncio.wait_for(reader.read(), 20) for reader, _ in opened]
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
        for _, writer in opened:
            writer.close()
        async with session.get(f"{url}/instances/i1/echo") as answer:
            assert answer.status == 418

    run(tmp_path, scenario)
