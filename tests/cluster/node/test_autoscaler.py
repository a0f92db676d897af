"""Ray's own autoscaler adds nodes for instances that lack room, and takes them away once they are not needed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fake_nvml
import pytest
from cluster_nodes import MODEL, ClusterNode, complete
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

_MOST = 4  # machines beside the head
_IDLE_S = 6


class Cloud:
    """Starts a node on every machine that the autoscaler makes, and kills it when the machine is terminated."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder = folder
        self._nodes: dict[str, ClusterNode] = {}
        self._gpu = {  # a machine whose GPU is host memory
            "PYTHONPATH": str(Path(__file__).parents[2] / "support/gpus/gpu_nodes"),
            "NVML": fake_nvml.build(folder),
            "FAKE_GPUS": "A10,GPU-0,24000,23000,4,16",
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        tags = {"ray-node-type": "head", "ray-user-node-type": "head", "ray-node-status": "up-to-date"}
        (folder / "0.json").write_text(json.dumps({"tags": tags, "host": "127.0.0.2", "wanted": True}))
        environ = {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "PYTHONPATH": str(Path(__file__).parents[2] / "support/clusters"),
            "RAY_enable_autoscaler_v2": version,
            **_machine("0", "head"),
        }
        flags = ["--autoscaling-config", str(self._configuration())]
        self.head = ClusterNode("head", 0, flags=flags, environ=environ)

    def _configuration(self) -> Path:
        """What `--autoscaling-config` takes."""
        kind = {"resources": {"medusa_node": 1}, "node_config": {}, "min_workers": 0}
        provider = {
            "type": "external",
            "module": "machine_provider.Machines",
            "folder": str(self._folder),
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        }
        lists = [f"{who}setup_commands" for who in ("", "head_", "worker_")]
        lists += ["cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands"]
        config = {
            "cluster_name": "test",
            "max_workers": _MOST,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": _IDLE_S / 60,
            "provider": provider,
            "available_node_types": {
                "head": kind | {"max_workers": 0},
                "worker": kind | {"max_workers": _MOST},
                "gpu": kind | {"max_workers": _MOST, "resources": {"medusa_node": 1, "GPU": 1}},
            },
            "head_node_type": "head",
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
            **{name: [] for name in lists},
        }
        path = self._folder / "autoscaling.yaml"
        path.write_text(json.dumps(config))
        return path

    def start(self) -> None:
        self.head.wait_ready()
        self._thread.start()

    def kinds(self) -> list[str]:
        """The kinds of the machines that were made beside the head."""
        tags = [json.loads((self._folder / f"{name}.json").read_text())["tags"] for name in self.machines()]
        return [tag["ray-user-node-type"] for tag in tags]

    def machines(self) -> dict[str, bool]:
        """The machines that were ever made, and whether each is there still."""
        found = {path.stem: json.loads(path.read_text())["wanted"] for path in self._folder.glob("*.json")}
        return {name: wanted for name, wanted in found.items() if name != "0"}

    def said(self) -> str:
        """The output of all nodes, shown when the test fails."""
        logs = (self.head.folder / "ray" / "t" / "session_latest" / "logs").glob("monitor.*")
        said = [self.head.output(), str(self.machines()), str(self.head.call("status")["events"])]
        return "\n".join([*said, *(log.read_text()[-3000:] for log in logs)])

    def _watch(self) -> None:
        while not self._ended.wait(0.3):
            for name, wanted in self.machines().items():
                if wanted and name not in self._nodes:
                    kind = json.loads((self._folder / f"{name}.json").read_text())["tags"]["ray-user-node-type"]
                    environ = _machine(name, kind) | (self._gpu if kind == "gpu" else {})
                    self._nodes[name] = ClusterNode(f"n{name}", int(name), self.head, environ=environ)
                elif not wanted and name in self._nodes and self._nodes[name].process.poll() is None:
                    self._nodes[name].process.kill()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for node in (*self._nodes.values(), self.head):
            node.close()


def _machine(name: str, kind: str) -> dict[str, str]:
    """The variables by which a cloud identifies a machine to the node on it."""
    return {"RAY_CLOUD_INSTANCE_ID": name, "RAY_NODE_TYPE_NAME": kind}


@pytest.fixture(params=["0", "1"], ids=["v1", "v2"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    folder = tmp_path / "machines"
    folder.mkdir()
    cloud = Cloud(folder, request.param)
    try:
        cloud.start()
        yield cloud
    finally:
        cloud.close()


def test_nodes_come_for_instances_that_lack_room_and_go_when_nothing_runs_there(cloud: Cloud) -> None:
    head = cloud.head

    def ready() -> bool:
        instances = head.call("routes")["models"]["tiny"]["instances"]
        return [instance["state"] for instance in instances] == ["ready"] * 3

    head.call("deploy", name="tiny", url=f"file://{MODEL}", min=3, max=3)
    until(ready, cloud.said)
    assert cloud.machines() == {"1": True, "2": True}  # and no others, though they came one by one
    assert cloud.kinds() == ["worker", "worker"], "nothing needs a GPU"
    time.sleep(_IDLE_S + 5)
    assert ready()  # Ray has no task there, but these nodes serve
    assert cloud.machines() == {"1": True, "2": True}

    head.call("scale", name="tiny", min=1, max=3)
    left = until(lambda: not ready() and head.ready_instance("tiny"), cloud.said)
    used = {left["node"].removeprefix("n")} & {"1", "2"}  # or it is on the head, which always stays
    until(lambda: {name for name, wanted in cloud.machines().items() if wanted} == used, cloud.said)
    assert head.ready_instance("tiny") == left
    assert complete(left["url"], head.headers())["choices"][0]["text"]


def test_a_node_with_a_gpu_comes_for_a_model_that_needs_one(cloud: Cloud) -> None:
    head = cloud.head
    head.call("deploy", name="tiny", url=f"file://{MODEL}", min=1, max=1, settings={"device": "cuda"})
    until(lambda: head.ready_instance("tiny"), cloud.said)
    assert cloud.kinds() == ["gpu"], "the head's processor is free"
    status = head.status_of("n1")
    assert (status["devices"], status["device_name"]) == (1, "A10")
    time.sleep(5)
    assert cloud.kinds() == ["gpu"], "and no other one after it"
