"""A node reads the metrics of its instances."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path

import pytest
from aiohttp import ClientSession
from medusa_cluster.deployment import Deployment
from medusa_cluster.node import instance_readers
from medusa_cluster.node.instance_readers import MetricsReader, engine_gauges, read_page
from medusa_cluster.node.instances import Instances, RunningInstance
from medusa_cluster.node.settings import NodeServerSettings
from scripted_server import ScriptedServer

PAGE = """# HELP medusa_engine_kv_tokens Tokens that the KV cache has room for.
medusa_engine_kv_tokens{model="a model"} 1000
medusa_engine_kv_tokens_used{model="a model"} 250
medusa_engine_prefill_tokens_per_s{model="a model"} 4000
"""


def test_gauges_that_are_missing_are_0() -> None:
    assert list(engine_gauges(PAGE).values()) == [1000, 250, 4000]
    assert list(engine_gauges("medusa_ready 0\n").values()) == [0, 0, 0]


@pytest.mark.parametrize("value", ["many", "nan", "-1", "+Inf"])
def test_what_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"medusa_engine_kv_tokens|could not convert"):
        engine_gauges(f"medusa_engine_kv_tokens {value}\n")


def test_a_page_without_an_end_is_not_kept() -> None:
    """The port of an instance that has ended may be another process's."""

    async def run(port: int) -> None:
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        listening.set_result(port)
        instance = RunningInstance("i", Deployment("m", "/m"), "secret", listening)
        async with ClientSession() as session:
            await read_page(session, instance, "/metrics")

    endless = itertools.chain([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"], itertools.repeat(bytes(1 << 20)))
    with (
        ScriptedServer(lambda _: endless) as server,
        pytest.raises(ValueError, match="at most 16777216 bytes"),
    ):
        asyncio.run(run(server.port))


def test_instances_with_requests_are_read_and_what_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    pages = [
        PAGE,
        PAGE.replace("250", "500"),
        "",
        "zip",
        "medusa_engine_kv_tokens nan\n",
        "medusa_engine_kv_tokens 5\n",
    ]
    used = []

    async def run() -> None:
        instances = Instances(NodeServerSettings("n1", tmp_path, "127.0.0.1", tmp_path / "token"))
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        one = RunningInstance("i", Deployment("m", "/m"), "secret", listening, running=1)
        instances.add(one)

        def answer(head: bytes) -> bytes:
            assert head.startswith(b"GET /metrics ")
            assert b"Authorization: Bearer secret\r\n" in head
            used.append(instances.status({})[0]["kv_use"])
            page = pages.pop(0)
            kind = "text/plain; charset=zip" if page == "zip" else "text/plain"
            if not pages:
                one.running = 0
            head_lines = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(page)}\r\n\r\n"
            return f"{head_lines}{page}".encode() if page else b"no HTTP"

        with ScriptedServer(answer) as server:
            listening.set_result(server.port)
            reading = asyncio.create_task(MetricsReader(instances).run())
            async with asyncio.timeout(60):
                while one.running:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(1.5)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert len(server.requests) == 6, "it is read without requests"
        assert one.prefill_tokens_per_s == 4000
        assert instances.status({})[0]["kv_use"] == 0, "without requests"

    asyncio.run(run())
    assert used == [0, 0.25, 0.5, 0.5, 0.5, 0.5]


def test_an_instance_that_hangs_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_readers, "_PAUSE_S", 0.01)
    hung, released = [], threading.Event()

    def hang(_: bytes) -> bytes:
        hung.append(True)
        released.wait(60)
        return b""

    async def run(ports: dict[str, int]) -> None:
        instances = Instances(NodeServerSettings("n1", tmp_path, "127.0.0.1", tmp_path / "token"))
        for name, port in ports.items():
            listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            listening.set_result(port)
            instances.add(RunningInstance(name, Deployment("m", "/m"), "secret", listening, running=1))
        reading = asyncio.create_task(MetricsReader(instances).run())
        async with asyncio.timeout(60):
            while not hung or len(answering.requests) < 3:
                await asyncio.sleep(0.02)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    page = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(PAGE)}\r\n\r\n{PAGE}".encode()
    with ScriptedServer(hang) as hanging, ScriptedServer(lambda _: page) as answering:
        asyncio.run(run({"hanging": hanging.port, "answering": answering.port}))
        assert len(hung) == 1, "the other one was read three times meanwhile"
        released.set()
