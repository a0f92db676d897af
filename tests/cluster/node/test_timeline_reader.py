"""Summaries of the starts of a node's instances, made of their timelines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from medusa_cluster.deployment import Deployment
from medusa_cluster.node.group_worker import GroupWorker
from medusa_cluster.node.instance_readers import TimelineReader, start_times
from medusa_cluster.node.instances import Instances, RunningInstance
from medusa_cluster.node.settings import NodeServerSettings

S = 1_000_000_000


def stage(name: str, start_s: float, end_s: float | None = None, process: str = "engine") -> dict[str, Any]:
    end_s = start_s if end_s is None else end_s
    moments = {"start_ns": int(start_s * S), "end_ns": int(end_s * S), "duration_ms": (end_s - start_s) * 1e3}
    return {"name": name, "process": process, "detail": {}, **moments}


@asynccontextmanager
async def served(timeline: Callable[[], str]) -> AsyncIterator[int]:
    """Answer requests for a timeline. Yields the port."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=timeline(), content_type="application/json")

    app = web.Application()
    app.router.add_get("/timeline", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


START = [stage("exec", 10, 10.1), stage("skeleton", 10.2, 10.5)]
ANSWER = [stage("wait", 14.5, 15), stage("first_forward", 14, 15.25), stage("first_token", 15.5)]


def test_a_start_without_a_first_token_is_none_yet() -> None:
    assert start_times(START, 10 * S) is None


def test_a_start_for_which_a_request_waited_is_timed_from_exec() -> None:
    found = start_times([*START, *ANSWER, stage("load", 10.5, 15)], int(10.2 * S))
    assert found == {"ttft_s": 5.5, "begins_s": 0.5, "prefill_s": pytest.approx(0.75)}


def test_what_an_engine_does_between_its_weights_and_its_first_forward_counts_as_prefill() -> None:
    stages = [*START, stage("load", 10.5, 13), stage("first_forward", 14, 14.25), stage("first_token", 14.25)]
    early, late = start_times(stages, int(10.2 * S)), start_times(stages, int(13.9 * S))
    assert early is not None
    assert late is not None
    assert [early["prefill_s"], late["prefill_s"]] == pytest.approx([1.25, 0.25])


def test_a_start_that_nobody_waited_for_has_no_time_to_its_first_token() -> None:
    stages = [*START, stage("load", 10.5, 13), *ANSWER]
    for first_request_ns in (None, int(13.5 * S)):
        found = start_times(stages, first_request_ns)
        assert found is not None
        assert found["ttft_s"] == 0.0


@pytest.mark.parametrize("own", [[], [stage("load", 10.5, 13), stage("form", 10.5, 13.5)]], ids=["alone", "leader"])
def test_what_is_loaded_later_changes_nothing(own: list[Any]) -> None:
    """A group's leader loads the rest after the first token; an instance may still load its last layers."""
    stages = [*START, *own, *ANSWER]
    first_request_ns = int((10.2 if own else 13.8) * S)
    first = start_times(stages, first_request_ns)
    assert first is not None
    assert first["ttft_s"] == 5.5
    assert start_times([*stages, stage("load", 15.5, 30)], first_request_ns) == first


@pytest.mark.parametrize("timeline", ["[]", '{"stages": [1]}', '{"stages": [{}]}', "[" * 100_000, '{"stages": 7}'])
def test_a_timeline_that_is_none_changes_nothing(timeline: str) -> None:
    """The port of an instance that has ended may be another process's."""
    instance: Any = SimpleNamespace(id="one", port=0, secret="s", first_request_ns=None, start=None, group_state=None)

    async def look() -> None:
        async with served(lambda: timeline) as instance.port, aiohttp.ClientSession() as session:
            await TimelineReader(instance)._read(session, instance)

    asyncio.run(look())
    assert (instance.start, instance.group_state) == (None, None)


@pytest.mark.parametrize(
    ("read", "told", "lost"),
    [
        (["prefilling", "released"], False, True),
        (["prefilling", "released"], True, False),
        (["released"], False, False),
    ],
)
def test_one_that_ends_its_prefilling_though_nobody_told_it_so_has_lost_its_source(
    tmp_path: Path, read: list[str], told: bool, lost: bool
) -> None:
    plan = {"group": "g", "token": "t", "mode": "disaggregated", "size": 9, "rank": 1, "leader": "127.0.0.1:80"}
    found = {**plan, "listen": "127.0.0.1:81", "then": "stay", "helps": "d"}
    stages = [stage(name, 1.0 + number, 2.0 + number) for number, name in enumerate(read)]

    async def run() -> dict[str, Any]:
        instances = Instances(NodeServerSettings("n1", tmp_path, "127.0.0.1", tmp_path / "token"))
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        worker = GroupWorker.from_json(found, "127.0.0.1")
        one = RunningInstance("i", Deployment("m", "/m"), "s", listening, worker=worker)
        instances.add(one)
        if told:
            instances.release("i")
        async with served(lambda: json.dumps({"stages": stages})) as port, aiohttp.ClientSession() as session:
            listening.set_result(port)
            await TimelineReader(instances)._read(session, one)
        assert one.worker is not None
        return one.worker.status(one.group_state)["pair"]

    pair = asyncio.run(run())
    assert (pair["role"], pair["helps"], pair["lost"]) == ("decode", "d", lost)


def test_one_that_was_told_to_prefill_no_more_is_read_often(tmp_path: Path) -> None:
    """It takes no requests before its node has read that it has handed over; one that prefills may do so for hours."""
    plan = {"group": "g", "token": "t", "mode": "disaggregated", "size": 9, "rank": 1, "leader": "127.0.0.1:80"}
    worker = GroupWorker.from_json({**plan, "listen": "127.0.0.1:81", "then": "stay"}, "127.0.0.1")
    reads: list[float] = []

    def timeline() -> str:
        reads.append(time.monotonic())
        return '{"stages": []}'

    async def run() -> int:
        instances = Instances(NodeServerSettings("n1", tmp_path, "127.0.0.1", tmp_path / "token"))
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        one = RunningInstance("i", Deployment("m", "/m"), "s", listening, worker=worker, group_state="prefilling")
        instances.add(one)
        async with served(timeline) as port:
            listening.set_result(port)
            reading = asyncio.create_task(TimelineReader(instances).run())
            await asyncio.sleep(1.5)
            before = len(reads)
            instances.release("i")
            async with asyncio.timeout(20):
                while len(reads) < before + 4:
                    await asyncio.sleep(0.02)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        return before

    before = asyncio.run(run())
    assert before <= 2
    assert reads[-1] - reads[before] < 5, "three times 2 s, if it were read as before"
