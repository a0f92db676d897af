"""Ray's own command line with more patience."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from medusa_cluster.node import ray_start

pytestmark = pytest.mark.cluster


def ray_version(before: str) -> subprocess.CompletedProcess[str]:
    """Run `ray --version` as a node server runs `ray start`, after some lines of Python."""
    code = f"{before}\nfrom medusa_cluster.node.ray_start import main\nraise SystemExit(main(['--version']))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_a_raylet_that_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    services = pytest.importorskip("ray._private.services")
    looks: list[Any] = []

    def get_node(*arguments: Any) -> dict[str, Any]:
        looks.append(arguments)
        if len(looks) < 3:
            raise RuntimeError("This node has an ID but is not found")
        return {"node_id": arguments[1]}

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray_start, "_PAUSE_S", 0.001)
    assert ray_start.be_patient()
    assert services.get_node("address", "id") == {"node_id": "id"}
    assert len(looks) == 3
    monkeypatch.setattr(ray_start, "_PATIENCE_S", 0.0)
    looks.clear()
    with pytest.raises(RuntimeError, match="not found"):
        services.get_node("address", "id")


def test_a_ray_without_the_private_function_starts_as_it_does_by_itself() -> None:
    done = ray_version("import ray._private.services as services; del services.get_node")
    assert "no more than 30 s" in done.stderr
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["ray,", "version"])
