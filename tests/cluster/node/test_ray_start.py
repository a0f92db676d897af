"""Ray's own command line with more patience."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from medusa_cluster.node.ray import start as ray_start

pytestmark = pytest.mark.cluster


def ray_version(before: str) -> subprocess.CompletedProcess[str]:
    """Run `ray --version` as a node server runs `ray start`, after some lines of Python."""
    code = f"{before}\nfrom medusa_cluster.node.ray.start import main\nraise SystemExit(main(['--version']))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)


class Raylet:
    """A process that has ended when ``status`` says so."""

    status: int | None = None

    @property
    def process(self) -> Raylet:
        return self

    def poll(self) -> int | None:
        return self.status


def test_a_raylet_is_waited_for_while_it_lives_and_waits_for_no_helper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    services = pytest.importorskip("ray._private.services")
    raylet, looks = Raylet(), 0

    def start_raylet(address: str, node_id: str, session_dir: str, runtime_env_agent_port: int = 0) -> Raylet:
        return raylet

    def get_node(address: str, node_id: str) -> str:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise RuntimeError("This node has an ID but is not found")
        return node_id

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray_start, "_PAUSE_S", 0.001)
    assert ray_start.extend_ray_timeouts()
    assert services.start_raylet("host", "ab" * 28, session_dir=str(tmp_path), runtime_env_agent_port=6382) is raylet
    told = {path.name.rpartition("_")[0]: path.read_text() for path in tmp_path.iterdir()}
    assert told["runtime_env_agent_port"] == "6382"
    assert told["dashboard_agent_listen_port"] == "-1"
    assert services.get_node("host", "id") == "id"
    looks, raylet.status = 0, 1
    with pytest.raises(SystemExit, match="the raylet has ended"):
        services.get_node("host", "id")
    assert looks == 1


def test_a_ray_without_the_private_function_starts_as_it_does_by_itself() -> None:
    done = ray_version("import ray._private.services as services; del services.get_node")
    assert "no more than 30 s" in done.stderr
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["ray,", "version"])
