"""A node starts workers of groups as it starts instances, and tells a group what becomes of it."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from encoder_checkpoint import write_encoder
from engine_fixtures import checkpoint
from medusa_cluster.deployment import Deployment
from medusa_cluster.node.description import describe
from medusa_cluster.node.group_worker import GroupWorker, free_port
from medusa_cluster.node.instance_readers import TimelineReader
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
        "helping": True, "helps": "d", "prefills": True, "lost": False, "role": "prefill", "meets": None,
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
        assert one.worker is not None
        told = one.worker.status("prefilling")["pair"]
        assert (told["helping"], told["role"]) == (True, "decode")
        one.group_state = "released"
        instances.note_released(one)
        found = json.loads(path.read_text())
        assert (found["rank"], found["leader"], found["listen"], found["then"]) == (0, "127.0.0.1:81", None, "stay")
        assert one.worker is not None
        meets = {"group": "g", "at": "127.0.0.1:81"}
        assert one.worker.status("released")["pair"] == {
            "helping": False, "helps": "d", "prefills": False, "lost": False, "role": "decode", "meets": meets,
        }  # fmt: skip
        for has_prefilled in (True, False):  # then its source is gone, or has refused it
            one.worker, one.has_prefilled = prefills, has_prefilled
            instances.note_released(one)
            assert one.worker.status("released")["pair"]["lost"] is has_prefilled
        live = worker(1, 80, helps="d", mode="live", layers=None)
        one.worker = live
        for _ in range(2):
            instances.note_released(one)
            found = json.loads(path.read_text())
            assert (found["rank"], found["leader"], found["then"]) == (1, live.plan.leader, "up")
        assert one.worker.status("released")["pair"]["helping"] is False
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


@pytest.mark.slow
def test_an_instance_that_prefills_hands_over_before_it_is_stopped(tmp_path: Path, checkpoint: Path) -> None:
    """Prompts go on while the node stops it: none is lost, and none of its work is."""
    settings = NodeServerSettings(name="n1", folder=tmp_path, host="127.0.0.1", token_file=tmp_path / "token")
    settings.log_folder.mkdir(parents=True, exist_ok=True)
    deployment = Deployment(
        "m", str(checkpoint), disaggregated=True, settings={"threads": "1", "kv_cache_mb": "4", "device": "cpu"}
    )

    async def run() -> None:
        instances = Instances(settings)
        port = free_port("127.0.0.1")
        plan = {"mode": "disaggregated", "layers": None}
        for rank, more in enumerate([plan, {**plan, "helps": "i0", "listen": f"127.0.0.1:{free_port('127.0.0.1')}"}]):
            await instances.start(f"i{rank}", deployment, worker(rank, port, **more))
        decodes, prefills = (instances.get(f"i{rank}") for rank in range(2))
        assert decodes is not None
        assert prefills is not None

        def ask(path: str, body: dict[str, Any] | None = None) -> Any:
            headers = {"Authorization": f"Bearer {decodes.secret}", "Content-Type": "application/json"}
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{decodes.port}{path}", data, headers)
            with urllib.request.urlopen(request, timeout=90) as answer:
                return json.loads(answer.read())

        def complete() -> str:
            body = {"prompt": "Tokens flow " * 20, "max_tokens": 8, "temperature": 0}
            return str(ask("/v1/completions", body)["choices"][0]["text"])

        def complete_until() -> list[str]:
            found = [complete()]
            while not ended.is_set():
                found.append(complete())
            return found

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not condition():
                    await asyncio.sleep(0.05)

        ended = threading.Event()
        reading = asyncio.create_task(TimelineReader(instances).run())
        try:
            await until(lambda: prefills.group_state == "prefilling")
            asking = [asyncio.create_task(asyncio.to_thread(complete_until)) for _ in range(4)]
            await asyncio.sleep(1.0)
            began = time.monotonic()
            assert await instances.stop("i1", 30.0)
            assert time.monotonic() - began < 15
            await asyncio.sleep(1.0)
            ended.set()
            texts = [text for one in asking for text in await one]
            assert set(texts) == {await asyncio.to_thread(complete)}
            stages = (await asyncio.to_thread(ask, "/timeline"))["stages"]
            reasons = [stage["detail"]["reason"] for stage in stages if stage["name"] == "unpaired"]
            assert reasons == ["both are instances"]
            assert instances.get("i1") is None
        finally:
            ended.set()
            reading.cancel()
            await instances.end(0.0)
        assert not list(tmp_path.glob("group-*"))

    asyncio.run(run())


@pytest.mark.slow
def test_an_encoder_that_is_to_decode_does_all_by_itself(tmp_path: Path) -> None:
    """Such as one that starts before a node has described it; the controller starts others as a whole."""
    for package in ("transformers", "tokenizers"):
        pytest.importorskip(package)
    folder = write_encoder(tmp_path / "encoder", None)
    assert describe(str(folder))["generates"] is False
    settings = NodeServerSettings(name="n1", folder=tmp_path, host="127.0.0.1", token_file=tmp_path / "token")
    settings.log_folder.mkdir(parents=True, exist_ok=True)
    deployment = Deployment("m", str(folder), disaggregated=True, settings={"threads": "1", "device": "cpu"})

    async def run() -> None:
        instances = Instances(settings)
        plan = {"mode": "disaggregated", "layers": None}
        port = await instances.start("i0", deployment, worker(0, free_port("127.0.0.1"), **plan))
        headers = {
            "Authorization": f"Bearer {instances.get('i0').secret}",  # type: ignore[union-attr]
            "Content-Type": "application/json",
        }

        def embed() -> Any:
            body = json.dumps({"input": ["a cat sat", "on the mat"]}).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", body, headers)
            with urllib.request.urlopen(request, timeout=90) as answer:
                return json.loads(answer.read())

        try:
            assert len((await asyncio.to_thread(embed))["data"]) == 2
        finally:
            await instances.end(0.0)

    asyncio.run(run())
