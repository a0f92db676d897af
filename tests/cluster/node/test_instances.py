"""Instances that end before they listen, and settings of which no process can be made."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from medusa_cluster.deployment import Deployment
from medusa_cluster.node import instances as instances_module
from medusa_cluster.node.instances import Instances
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
