"""A node starts workers of groups as it starts instances, and tells a group what becomes of it."""

from __future__ import annotations

import asyncio
import json
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import checkpoint
from medusa_cluster.deployment import Deployment
from medusa_cluster.node.group_worker import GroupWorker, free_port
from medusa_cluster.node.instances import Instances, RunningInstance
from medusa_cluster.node.settings import NodeServerSettings
from medusa_runtime.errors import ConfigError

__all__ = ["checkpoint"]

PLAN = {"group": "g", "token": "t", "size": 2, "then": "stay"}


def worker(rank: int, port: int, **changes: Any) -> GroupWorker:
    found = {**PLAN, "rank": rank, "leader": f"127.0.0.1:{port}", "layers": ("0:2", "2:4")[rank], **changes}
    return GroupWorker.from_json(found, "127.0.0.1")


def test_what_is_no_worker_is_refused() -> None:
    for changes, reason in (
        ({"layers": 3}, "layers: expected"),
        ({"size": 1}, "size: expected"),
        ({"x": 1}, "unknown"),
    ):
        with pytest.raises(ConfigError, match=reason):
            worker(1, 80, **changes)
    with pytest.raises(ConfigError, match="expected an object"):
        GroupWorker.from_json([], "127.0.0.1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keep: expected 1 to 2"):
        worker(0, 80).with_keep(3)
    with pytest.raises(ConfigError, match="of the group's leader"):
        worker(1, 80).with_keep(1)


def test_the_file_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "group.json"
    made = worker(0, 80)
    assert made.environment(path) == {"MEDUSA_GROUP": str(path), "MEDUSA_LAYERS": "0:2"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made.with_keep(2).write(path)
    found = json.loads(path.read_text())
    assert (found["then"], found["keep"], found["bind"]) == ("up", 2, "127.0.0.1")


def test_one_that_has_prefilled_says_so_in_its_file(tmp_path: Path) -> None:
    settings = NodeServerSettings(name="n1", folder=tmp_path, host="127.0.0.1", token_file=tmp_path / "token")
    plan = {"mode": "disaggregated", "size": 9, "layers": None, "listen": "127.0.0.1:81"}
    prefills = worker(1, 80, helps="d", **plan)
    assert prefills.status("prefilling")["pair"] == {
        "helping": True, "helps": "d", "prefills": True, "role": "prefill", "meets": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="expected an instance that prefills"):
        worker(0, 80, **plan | {"listen": None}).released()

    async def run() -> None:
        instances = Instances(settings)
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        one = RunningInstance("i", Deployment("m", "/m"), "s", listening, worker=prefills, group_state="prefilling")
        instances.add(one)
        path = tmp_path / "group-i.json"
        instances.release("i")
        assert json.loads(path.read_text())["then"] == "up"
        one.group_state = "released"
        instances.note_released(one)
        found = json.loads(path.read_text())
        assert (found["rank"], found["leader"], found["listen"], found["then"]) == (0, "127.0.0.1:81", None, "stay")
        assert one.worker is not None
        meets = {"group": "g", "at": "127.0.0.1:81"}
        assert one.worker.status("released")["pair"] == {
            "helping": False, "helps": None, "prefills": False, "role": "decode", "meets": meets,
        }  # fmt: skip
        one.failure = "it ended"
        path.unlink()
        with pytest.raises(ConfigError, match="expected an instance that prefills"):
            instances.release("i")
        assert not path.exists()

    asyncio.run(run())


@pytest.mark.slow
def test_two_instances_serve_as_a_group_and_then_as_instances(tmp_path: Path, checkpoint: Path) -> None:
    settings = NodeServerSettings(name="n1", folder=tmp_path, host="127.0.0.1", token_file=tmp_path / "token")
    settings.log_folder.mkdir(parents=True, exist_ok=True)
    deployment = Deployment("m", str(checkpoint), settings={"threads": "1", "kv_cache_mb": "4", "device": "cpu"})

    async def run() -> None:
        instances = Instances(settings)
        port = free_port("127.0.0.1")
        ports = [await instances.start(f"i{rank}", deployment, worker(rank, port)) for rank in range(2)]
        secrets = [instances.get(f"i{rank}").secret for rank in range(2)]  # type: ignore[union-attr]

        def complete(rank: int) -> str:
            body = json.dumps({"prompt": "Tokens flow", "max_tokens": 24, "temperature": 0}).encode()
            headers = {"Authorization": f"Bearer {secrets[rank]}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{ports[rank]}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=90) as answer:
                return str(json.loads(answer.read())["choices"][0]["text"])

        def ready(rank: int) -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{ports[rank]}/readyz", timeout=30) as answer:
                    return bool(answer.status == 200)
            except urllib.error.HTTPError:
                return False

        try:
            expected = await asyncio.to_thread(complete, 0)
            assert not await asyncio.to_thread(ready, 1)
            instances.consolidate("i0", 2)
            deadline = time.monotonic() + 60
            while not await asyncio.to_thread(ready, 1):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
            assert [await asyncio.to_thread(complete, rank) for rank in range(2)] == [expected] * 2
            with pytest.raises(ConfigError, match="expected the instance of a group's leader"):
                instances.consolidate("nobody", 1)
        finally:
            await instances.end(0.0)
        assert not list(tmp_path.glob("group-*"))

    asyncio.run(run())
