"""A node's GPUs: which there are, what the driver says of them, and which instance has which."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.deployment import Deployment
from medusa_cluster.node import gpus as node_gpus
from medusa_cluster.node.description import kv_bytes_per_token
from medusa_cluster.node.gpus import Gpus, visible_gpus
from medusa_cluster.node.instances import Instances
from medusa_cluster.node.settings import NodeServerSettings
from medusa_runtime.device.nvml import GpuInfo
from medusa_runtime.errors import InstanceError
from waiting import until

TORCH = Deployment("m", "http://127.0.0.1:1/m")
TWO = "A10,GPU-aa,24000,9000,4,16\nA10,GPU-bb,24000,23000,4,16"

Watched = Callable[..., Gpus]


def free_of(*gb: int) -> dict[str, list[int]]:
    return {"device_free_bytes": [one * 10**9 for one in gb], "device_free_sizes": [24 * 10**9 for _ in gb]}


@pytest.fixture
def watched(fake_nvml: str) -> Iterator[Watched]:
    made: list[Gpus] = []

    def watch(*names: str, link_bytes_per_s: float | None = None) -> Gpus:
        gpus = Gpus(names, link_bytes_per_s, library=fake_nvml)
        made.append(gpus)
        gpus.begin()
        until(lambda: "device_name" in gpus.status())
        return gpus

    yield watch
    for gpus in made:
        gpus.close()


def test_the_gpus_are_those_on_which_an_engine_would_compute(
    tmp_path: Path, fake_nvml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GPUS", TWO)

    def found(**environ: str) -> tuple[str, ...]:
        return visible_gpus(environ, root=tmp_path, torch=tmp_path, library=fake_nvml)

    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert found() == (), "torch is not built for CUDA"
    (tmp_path / "version.py").write_text("cuda = '13.0'\n")
    before = CDLL(fake_nvml).fake_opened()
    assert found() == ("0", "1")
    assert CDLL(fake_nvml).fake_opened() == before, "the node server is forked afterwards"
    assert found(CUDA_VISIBLE_DEVICES="1") == ("1",)
    assert found(CUDA_VISIBLE_DEVICES="GPU-aa, 1,-1,0") == ("GPU-aa", "1")
    assert found(CUDA_VISIBLE_DEVICES="") == ()
    monkeypatch.setenv("FAKE_NVML", "nvmlInit_v2")
    assert found() == ("0",)
    for name in ("nvidia0", "nvidia1", "nvidia-uvm", "nvidia-modeset", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    for number in range(3):  # as in a container that was given two of a machine's three
        (tmp_path / f"proc/driver/nvidia/gpus/{number}").mkdir(parents=True)
    assert found() == ("0", "1")


def test_a_node_says_what_its_gpus_have(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", TWO)
    gpus = watched("0", "1")
    sizes = [24 * 10**9, 24 * 10**9]
    found = {"devices": 2, "device_name": "A10", "device_bytes": 24 * 10**9, "device_sizes": sizes}
    link = {"load_bytes_per_s": pytest.approx(27.7e9, rel=0.01)}
    assert gpus.status() == {**found, **link, **free_of(23, 9)}
    first = gpus.lend("i", TORCH)
    assert first.environment == {"CUDA_VISIBLE_DEVICES": "1"}  # which has the most free memory
    assert gpus.status() == {**found, **link, **free_of(9)}
    gpus.lend("j", TORCH)
    assert gpus.status() == {**found, **link, **free_of()}
    gpus.take_back(first)
    until(lambda: gpus.status() == {**found, **link, **free_of(23)})
    monkeypatch.setenv("FAKE_GPUS", "A10,GPU-aa,24000,1,4,16\nL4,GPU-bb,0,0,4,8")
    mixed = watched("GPU-b", "GPU-a", link_bytes_per_s=5e9).status()
    assert mixed == {"devices": 2, "device_name": "A10 and L4", "load_bytes_per_s": 5e9}


def test_the_parts_of_a_gpu_in_mig_mode_are_lent_by_their_uuids(
    tmp_path: Path, fake_nvml: str, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    (tmp_path / "version.py").write_text("cuda = '13.0'\n")
    parts = "H100 1g,MIG-a,10000,9000,0,0\nH100 1g,MIG-b,10000,9500,0,0"
    monkeypatch.setenv("FAKE_GPUS", f"H100,GPU-x,80000,70000,5,16\n{parts}")
    names = visible_gpus({}, root=tmp_path, torch=tmp_path, library=fake_nvml)
    assert names == ("MIG-a", "MIG-b")
    gpus = watched(*names)
    assert gpus.status()["device_free_bytes"] == [9.5e9, 9e9], "of the part, not of the whole GPU"
    assert gpus.status()["devices_apart"]
    with pytest.raises(InstanceError, match="expected 2 free GPUs, found 0 of 2"):
        gpus.lend("l", Deployment("m", "u", engine="vllm", settings={"tensor_parallel": "2"}))
    assert gpus.lend("i", TORCH).environment == {"CUDA_VISIBLE_DEVICES": "MIG-b"}


def test_a_lost_gpu_is_lent_to_nobody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_GPUS", "A10,error 15,0,0,4,16\nA10,GPU-bb,24000,23000,4,16")
    gpus = watched("0", "1")
    assert (gpus.status()["devices"], gpus.status()["devices_lost"]) == (2, 1)
    assert gpus.status()["device_free_bytes"] == [23 * 10**9]
    assert gpus.lend("i", TORCH).environment == {"CUDA_VISIBLE_DEVICES": "1"}
    with pytest.raises(InstanceError, match=r"found 0 of 2; the others are lent to i; 1 fell off the bus"):
        gpus.lend("j", TORCH)
    assert "1 of the node's 2 GPUs have fallen off the bus" in caplog.text


def test_a_lost_gpu_may_come_back_while_a_status_is_made() -> None:
    gpus = Gpus(("0", "1"))
    first, second = (GpuInfo(uuid, "A10", 24 * 10**9, 23 * 10**9, 1e9) for uuid in ("GPU-aa", "GPU-bb"))

    class Looking(frozenset[str]):
        """The lost GPUs, of which the other thread sees one again while the first GPU is asked about."""

        def __contains__(self, name: object) -> bool:
            if name == "0":
                gpus._take([first, second], 1.0)
            return super().__contains__(name)

    gpus._take([first, second._replace(lost=True)], 0.0)
    gpus._lost = Looking(gpus._lost)
    assert gpus.status()["devices"] == 2


def test_numbers_of_gpus_that_differ_are_those_of_addresses(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "A10,GPU-aa,24000,9000,4,16\nL4,GPU-bb,12000,11000,4,16")
    assert watched("1").status()["device_name"] == "L4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")  # in CUDA's own order
    gpus = Gpus(("1", "0"), library=watched("GPU-b")._library)
    gpus.begin()
    time.sleep(0.2)
    gpus.close()
    assert gpus.status() == {"devices": 2}, "it is not known which is which"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert watched("1").status()["device_name"] == "L4"


def test_a_gpu_is_free_again_once_its_memory_is(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_gpus, "_RETURNS_WITHIN_S", 60.0)
    monkeypatch.setattr(node_gpus, "_LOOK_S", 60.0)
    monkeypatch.setenv("FAKE_GPUS", "A10,GPU-aa,24000,23000,4,16")
    gpus = watched("0")
    loan = gpus.lend("i", TORCH)
    monkeypatch.setenv("FAKE_GPUS", "A10,GPU-aa,24000,500,4,16")  # the engine ends after its function
    gpus.take_back(loan)
    time.sleep(0.5)
    assert gpus.status()["device_free_bytes"] == [], "one would think that another program has its memory"
    monkeypatch.setenv("FAKE_GPUS", "A10,GPU-aa,24000,22700,4,16")
    until(lambda: gpus.status()["device_free_bytes"] == [22_700 * 10**6])
    again = gpus.lend("j", TORCH)
    monkeypatch.setenv("FAKE_GPUS", "A10,GPU-aa,24000,400,4,16")
    gpus.take_back(again)
    monkeypatch.setattr(node_gpus, "_RETURNS_WITHIN_S", 0.3)
    until(lambda: gpus.status()["device_free_bytes"] == [400 * 10**6])  # another program has it by now


def test_an_instance_gets_the_smallest_gpus_with_room_for_it(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": 80_000, "b": 24_000, "c": 48_000}
    monkeypatch.setenv("FAKE_GPUS", "\n".join(f"X,GPU-{name},{mb},{mb},4,16" for name, mb in sizes.items()))
    gpus = watched("0", "1", "2")
    assert gpus.status()["device_bytes"] == 24 * 10**9
    assert gpus.status()["device_sizes"] == [80 * 10**9, 48 * 10**9, 24 * 10**9]
    assert gpus.lend("i", TORCH, 20 * 10**9).names == ("1",)
    assert gpus.lend("j", TORCH, 50 * 10**9).names == ("0",)
    assert gpus.lend("k", TORCH, 50 * 10**9).names == ("2",), "its engine says what is missing"


def test_a_gpu_that_is_lost_while_it_is_lent_is_not_lent_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_gpus, "_LOOK_S", 0.05)
    monkeypatch.setenv("FAKE_GPUS", TWO)
    gpus = watched("0", "GPU-bb")
    loan = gpus.lend("i", TORCH)
    assert loan.names == ("GPU-bb",)
    monkeypatch.setenv("FAKE_GPUS", TWO.replace("GPU-bb", "error 15"))
    until(lambda: gpus.status()["device_sizes"] == [24 * 10**9])
    status = gpus.status()
    assert (status["devices"], "devices_lost" in status, status["device_name"]) == (2, False, "A10"), "it is lent still"
    gpus.take_back(loan)
    assert (gpus.status()["devices_lost"], gpus.status()["device_free_bytes"]) == (1, [9 * 10**9])
    gpus.lend("j", TORCH)
    with pytest.raises(InstanceError, match="found 0 of 2; the others are lent to j; 1 fell off the bus"):
        gpus.lend("k", TORCH)
    monkeypatch.setenv("FAKE_GPUS", TWO)
    until(lambda: "devices_lost" not in gpus.status())
    assert gpus.lend("k", TORCH).names == ("GPU-bb",)


def test_what_was_seen_of_the_gpus_holds_while_the_driver_fails(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_gpus, "_LOOK_S", 0.05)
    monkeypatch.setenv("FAKE_GPUS", TWO)
    gpus = watched("0", "1")
    before = gpus.status()
    monkeypatch.setenv("FAKE_NVML", "nvmlDeviceGetCount_v2")
    until(lambda: "the node's GPUs are not seen" in caplog.text)
    assert gpus.status() == before, "else it would be another kind of processor"
    monkeypatch.setenv("FAKE_NVML", "")
    monkeypatch.setenv("FAKE_GPUS", TWO.replace("9000", "8000"))
    until(lambda: gpus.status()["device_free_bytes"][-1] == 8 * 10**9)


def test_of_gpus_that_the_driver_does_not_describe_only_the_number_is_said(
    fake_nvml: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = Gpus(("0",), library="/nowhere/libnvidia-ml.so.1")
    gpus.begin()
    until(lambda: "the node's GPUs are not seen" in caplog.text)
    gpus.close()
    assert gpus.status() == {"devices": 1}
    assert gpus.lend("i", TORCH).environment == {}


def test_a_gpu_is_lent_to_one_instance_at_a_time() -> None:
    gpus = Gpus(("0", "1", "2"))
    assert gpus.lend("c", Deployment("m", "u", settings={"device": "cpu"})).environment == {}
    shared = gpus.lend("i", Deployment("m", "u", engine="vllm", settings={"tensor_parallel": "2"}))
    assert shared.environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert gpus.lend("j", TORCH).environment == {"CUDA_VISIBLE_DEVICES": "2"}
    with pytest.raises(InstanceError, match="expected 1 free GPU, found 0 of 3; the others are lent to i, j"):
        gpus.lend("k", TORCH)
    gpus.take_back(shared)
    gpus.take_back(shared)
    assert gpus.lend("k", TORCH).environment == {"CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(InstanceError, match="expected 2 free GPUs, found 1 of 3; the others are lent to j, k"):
        gpus.lend("l", Deployment("m", "u", engine="vllm", settings={"tensor_parallel": "2"}))
    with pytest.raises(InstanceError, match="expected 2 free GPUs, found 1 of 1"):
        Gpus(("0",)).lend("l", Deployment("m", "u", engine="vllm", settings={"tensor_parallel": "2"}))


def test_an_instance_has_its_gpu_until_its_process_has_ended(tmp_path: Path) -> None:
    settings = NodeServerSettings("n", tmp_path, "127.0.0.1", tmp_path / "token", gpus=("0", "1"))
    settings.log_folder.mkdir()

    async def scenario() -> None:
        instances = Instances(settings)
        starts = [asyncio.create_task(instances.start(name, TORCH)) for name in "ab"]
        await asyncio.sleep(0)
        children = [instance.child for instance in instances.all()]
        environments = [Path(f"/proc/{child.pid}/environ").read_text().split("\0") for child in children if child]
        assert ["CUDA_VISIBLE_DEVICES=0" in environments[0], "CUDA_VISIBLE_DEVICES=1" in environments[1]] == [True] * 2
        assert all("CUDA_DEVICE_ORDER=PCI_BUS_ID" in environment for environment in environments)
        with pytest.raises(InstanceError, match="c could not start on the node n: expected 1 free GPU, found 0 of 2"):
            await instances.start("c", TORCH)
        await instances.stop("a", 0.0)
        starts.append(asyncio.create_task(instances.start("d", TORCH)))
        await asyncio.sleep(0)
        assert instances.get("d").failure is None  # type: ignore[union-attr]
        await instances.end(0.0)
        await asyncio.gather(*starts, return_exceptions=True)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"num_key_value_heads": 8}, 8),
        ({}, 71),
        ({"model_type": "falcon"}, 1),
        ({"model_type": "falcon", "multi_query": False}, 71),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
    ],
)
def test_keys_and_values_are_counted_by_their_heads(config: dict[str, Any], heads: int) -> None:
    of_falcon = {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}
    assert kv_bytes_per_token(json.dumps(of_falcon | config).encode()) == 32 * 2 * heads * 64 * 2
