"""A node whose link is cut for a while: others serve meanwhile, and it comes back with what it had."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import Laboratory
from waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
NAME = "pydoc-lm"


def test_a_node_that_was_cut_off_is_replaced_and_comes_back() -> None:
    with Laboratory(2, "400mbit", origin={NAME: EXAMPLE}) as lab:
        cluster = LabCluster(lab, ["--prewarm", "torch=0"])
        cluster.start()

        def state(node: str) -> str:
            return next(str(item["state"]) for item in cluster.status()["nodes"] if item["name"] == node)

        def instances() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = cluster.call("routes")["models"][NAME]["instances"]
            return [item for item in found if item["state"] == "ready"]

        cluster.deploy(NAME, min=2, max=2)
        until(lambda: {item["node"] for item in instances()} == {"n1", "n2"})
        before = next(item["id"] for item in instances() if item["node"] == "n2")

        lab.cut("n2")  # for a second: nothing happens
        time.sleep(1)
        lab.restore("n2")
        time.sleep(3)
        assert state("n2") == "alive"
        assert before in [item["id"] for item in instances()]

        lab.cut("n2")  # until it is given up
        until(lambda: state("n2") == "lost")
        until(lambda: [item["node"] for item in instances()] == ["n1"])
        lab.restore("n2")
        until(lambda: state("n2") == "alive")
        until(lambda: {item["node"] for item in instances()} == {"n1", "n2"})
        assert before in [item["id"] for item in instances()]  # it went on running
        cluster.stop()
