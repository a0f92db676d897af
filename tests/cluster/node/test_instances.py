"""Instances that end before they listen, and settings of which no process can be made."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from medusa_cluster.deployment import Deployment
from medusa_cluster.node import instances as instances_module
from medusa_cluster.node.instances import Instances, RunningInstance
from medusa_cluster.node.processes.child import Child
from medusa_cluster.node.settings import NodeServerSettings
from medusa_runtime.errors import ConfigError, InstanceError


def settings_in(folder: Path) -> NodeServerSettings:
    settings = NodeServerSettings("n", folder, "127.0.0.1", folder / "token", data_port=1)
    settings.log_folder.mkdir()
    return settings


def test_a_start_ends_when_its_instance_is_stopped_before_it_listens(tmp_path: Path) -> None:
    async def scenario() -> None:
        instances = Instances(settings_in(tmp_path))
        deployment = Deployment("m", "http://127.0.0.1:1/model")
        starting = asyncio.create_task(instances.start("i", deployment))
        await asyncio.sleep(0)
        began = time.monotonic()
        await instances.stop("i", 0.0)
        with pytest.raises(InstanceError):
            await starting
        assert time.monotonic() - began < 30
        assert not instances.all()

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_text_that_no_process_can_be_given_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="settings: state"):
        Deployment.from_json({"name": "m", "url": "http://s/m", "settings": {"state": text}})

    async def scenario() -> None:
        instances = Instances(settings_in(tmp_path))
        deployment = Deployment("m", "http://s/m", settings={"state": text})
        with pytest.raises(InstanceError, match="could not start"):
            await instances.start("i", deployment)
        assert [one.state for one in instances.all()] == ["failed"]

    asyncio.run(scenario())


def test_the_logs_of_failed_instances_are_kept_but_not_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances_module, "_KEPT_LOGS", 2)

    async def scenario() -> None:
        settings = settings_in(tmp_path)
        instances = Instances(settings)
        deployment = Deployment("m", "http://s/m", settings={"state": "a\0b"})  # no process can be given this
        for number in range(4):
            (settings.log_folder / f"instance-i{number}.log").write_text("why")
            with pytest.raises(InstanceError, match="could not start"):
                await instances.start(f"i{number}", deployment)
        assert sorted(path.name for path in settings.log_folder.iterdir()) == ["instance-i2.log", "instance-i3.log"]

    asyncio.run(scenario())


def running_alone(instances: Instances) -> RunningInstance:
    """Add an instance that listens and runs a request; its process is one that sleeps."""
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    listening.set_result(1)
    instance = RunningInstance("i", Deployment("m", "http://s/m"), "s", listening, "ready", running=1)
    instance.child = Child(["sleep", "60"], {}, Path("/dev/null"), lambda line: None)
    instances.add(instance)
    return instance


def test_an_instance_that_drains_may_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        instances = Instances(settings_in(tmp_path))
        instance = running_alone(instances)
        stops = [asyncio.create_task(instances.stop("i", 30.0)) for _ in range(2)]  # an order may be repeated
        await asyncio.sleep(0.1)
        assert instance.state == "draining"
        assert instances.resume("i")
        assert instances.resume("i")
        assert await asyncio.gather(*stops) == [False, False]
        assert instances.get("i") is instance
        assert instance.state == "ready"
        instance.running = 0
        assert await instances.stop("i", 30.0)
        assert instances.get("i") is None

    asyncio.run(scenario())


def test_an_instance_whose_process_is_being_ended_does_not_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        instances = Instances(settings_in(tmp_path))
        running_alone(instances)
        stop = asyncio.create_task(instances.stop("i", 0.0))
        await asyncio.sleep(0)
        assert not instances.resume("i")
        assert await stop
        assert not instances.resume("i")

    asyncio.run(scenario())


def test_an_instance_started_again_under_the_id_of_a_failed_one_stays_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances_module, "_KEPT_ENDS_S", 0.1)

    async def scenario() -> None:
        instances = Instances(settings_in(tmp_path))
        with pytest.raises(InstanceError, match="could not start"):
            await instances.start("i", Deployment("m", "http://s/m", settings={"state": "a\0b"}))
        await instances.stop("i", 0.0)
        starting = asyncio.create_task(instances.start("i", Deployment("m", "http://127.0.0.1:1/model")))
        await asyncio.sleep(0.3)
        assert [one.id for one in instances.all()] == ["i"]
        await instances.stop("i", 0.0)
        await asyncio.gather(starting, return_exceptions=True)  # it may have listened before its end

    asyncio.run(scenario())


def test_what_a_killed_node_server_has_left_of_its_instances_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances_module, "_KEPT_LOGS", 2)
    settings = settings_in(tmp_path)
    for number in range(4):
        log = settings.log_folder / f"instance-i{number}.log"
        log.write_text("why")
        os.utime(log, (number, number))
        (tmp_path / f"group-i{number}.json").write_text("with a token")
    (tmp_path / "group-i1.json.part").write_text("with a")
    (settings.log_folder / "agent.log").write_text("of another process")
    Instances(settings)
    assert {path.name for path in settings.log_folder.iterdir()} == {"instance-i2.log", "instance-i3.log", "agent.log"}
    assert not list(tmp_path.glob("group-*"))
