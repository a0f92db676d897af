"""A node server with arguments that cannot be, and without room for a process."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_cluster.node import agent as agent_module
from medusa_cluster.node.agent import Agent
from medusa_cluster.node.instances import Instances
from medusa_cluster.node.operations import Operations
from medusa_cluster.node.server import NodeServer
from medusa_cluster.node.settings import NodeServerSettings
from medusa_cluster.transport.pacing import Pacer
from medusa_runtime.errors import ClusterError, ConfigError
from medusa_runtime.node.client import NodeClient


@pytest.mark.parametrize("limit", [math.nan, math.inf, -1, 0, "7", [], 10**400])
def test_a_pace_that_is_none_is_refused_and_the_old_one_stays(limit: object) -> None:
    pacer = Pacer(5e6)
    nothing: Any = None  # pacing needs no other part
    operations = Operations(nothing, nothing, nothing, nothing, nothing, pacer)
    with pytest.raises(ConfigError, match="pace: expected bytes a second above 0, or null"):
        asyncio.run(operations.answer({"op": "pace", "bytes_per_s": limit}))
    assert pacer.bytes_per_s == 5e6


def test_an_earlier_failure_of_a_model_that_is_fetched_again_is_not_shown(tmp_path: Path) -> None:
    region = {"url": "s://m", "state": "fetching", "fetched_bytes": 1, "total_bytes": 2, "pinned": False, "idle_s": 0.0}
    shown = {"regions": [region | {"version": ""}]}

    async def agent_status() -> dict[str, Any]:
        return shown

    settings = NodeServerSettings("n1", tmp_path, "127.0.0.1", tmp_path / "token")
    agent: Any = SimpleNamespace(status=agent_status, starts=1, failures={"s://m": "no space", "s://other": "gone"})
    peers: Any = SimpleNamespace(sent_bytes=0)
    nothing: Any = None
    operations = Operations(settings, agent, Instances(settings), nothing, peers, Pacer())
    status = asyncio.run(operations.answer({"op": "status"}))
    assert status["failed_fetches"] == {"s://other": "gone"}
    shown["regions"] = []
    operations._sources |= {"s://other": ["http://n2:8114"], "s://third": ["http://n2:8114"]}
    assert set(asyncio.run(operations.answer({"op": "status"}))["failed_fetches"]) == {"s://m", "s://other"}
    assert set(operations._sources) == {"s://third"}  # a later fetch of the others gets new ones


def test_failures_of_models_that_nobody_fetches_again_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in each status, four times a second."""
    monkeypatch.setattr(agent_module, "_MOST_FAILURES", 2)

    async def run() -> None:
        agent = Agent(NodeServerSettings("n1", tmp_path, "127.0.0.1", tmp_path / "token"))  # that nobody has started
        monkeypatch.setattr(agent_module, "NodeClient", lambda path, waits: NodeClient(path, waits=min(waits, 1)))
        for number in range(4):
            agent.fetch(f"s://m{number}", pin=False, version="")
            await asyncio.gather(*agent._fetches.values())
        assert list(agent.failures) == ["s://m2", "s://m3"]
        await agent.end()

    asyncio.run(run())


def test_the_controller_is_tried_again_where_its_process_cannot_be_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the folder of its log is missing; a machine without memory for a process raises an OSError, too."""

    async def run() -> None:
        settings = NodeServerSettings("n1", tmp_path / "gone", "127.0.0.1", tmp_path / "token")
        nothing: Any = None
        server = NodeServer(settings, nothing, nothing)
        server._ray_started.set()
        keeping = asyncio.create_task(server._keep_controller())
        while "could not be created" not in caplog.text and not keeping.done():
            await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()
        server._watchdog.close()

    asyncio.run(run())
    assert "the controller could not be created" in caplog.text


def test_a_node_says_that_it_is_ready_although_the_controller_once_answered_with_an_error(tmp_path: Path) -> None:
    async def run() -> None:
        settings = NodeServerSettings("n1", tmp_path, "127.0.0.1", tmp_path / "token")
        nothing: Any = None
        shown: list[str] = []
        server = NodeServer(settings, shown.append, nothing)
        known = {"name": "n1", "state": "alive", "address": settings.address}
        answers: list[Any] = [ClusterError("no node server"), {}, {"nodes": [known]}]

        class Controller:
            async def call(self, *_: object) -> Any:
                answer = answers.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return answer

        setattr(server, "_controller", Controller())  # noqa: B010
        server._ray_started.set()
        try:
            await asyncio.wait_for(server._announce_ready(), 5)
        finally:
            server._watchdog.close()
        assert shown == ["ready"]

    asyncio.run(run())
