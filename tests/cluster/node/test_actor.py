"""Whatever the controller asks of a node can be asked through Ray."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import medusa_cluster.controller
from medusa_cluster.node.ray.actor import NodeActor


def test_the_actor_has_every_operation_that_the_controller_sends() -> None:
    folder = Path(str(medusa_cluster.controller.__file__)).parent
    sent = {name for path in folder.glob("*.py") for name in re.findall(r'"op": "(\w+)"', path.read_text())}
    assert {"describe", "fetch", "group_port", "start"} <= sent
    assert [name for name in sorted(sent) if not hasattr(NodeActor, name)] == []
    assert "group" in inspect.signature(NodeActor.start).parameters
    assert "layers" in inspect.signature(NodeActor.fetch).parameters
