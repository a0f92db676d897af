"""`medusa cluster deploy --engine vllm`: instances and groups come and go as others do, with weights from peers."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from lab_cluster import EXAMPLE, GROUP_LINK, SETTINGS, ClusterWithoutRay, completion
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


def received(cluster: ClusterWithoutRay, node: str) -> dict[str, int]:
    """Return how many bytes of the model came to a node from where."""
    (found,) = (one for one in cluster.status()["nodes"] if one["name"] == node)
    return next((dict(model["received_bytes"]) for model in found["models"]), {})


def test_a_second_instance_gets_its_weights_from_a_peer() -> None:
    with Laboratory(2, LinkSpeed(50e6), origin={"m": EXAMPLE}) as lab:
        cluster = ClusterWithoutRay(lab, prewarm="vllm=1")
        cluster.start()
        until(lambda: all(node["memory_bytes"] for node in cluster.status()["nodes"]), cluster.told)
        for node in lab.nodes:
            until(lambda node=node: cluster.is_warm(node, "vllm"), cluster.told)
        cluster.start_gateway(8080)
        url = lab.forward(0, "switch", 8080)
        command = ["deploy", "m", "--model", f"{lab.origin_url}/m", "--engine", "vllm", "--min", "0", "--max", "2"]
        command += [f"--set={name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
        medusa = [sys.executable, "-m", "medusa_adapters", "cluster", *command, "--dir", lab.node_folder("n2")]
        lab.run("n2", medusa, check=True, timeout=240)
        greedy, seeded = completion(url), completion(url, 7)  # the first request starts the first instance
        (first,) = cluster.ready_nodes()
        (second,) = set(lab.nodes) - {first}
        cluster.call("scale", name="m", min=2, max=2)
        until(lambda: cluster.ready_nodes() == set(lab.nodes))
        peer = f"http://{lab.address(first)}:8114"
        weights = (EXAMPLE / "model.safetensors").stat().st_size
        until(lambda: sum(received(cluster, second).values()) > weights * 0.9)  # they are counted a moment later
        assert received(cluster, second).get(peer, 0) > weights * 0.9, received(cluster, second)
        assert {completion(url) for _ in range(4)} == {greedy}
        assert {completion(url, 7) for _ in range(4)} == {seeded}
        cluster.call("remove", name="m")
        until(lambda: not cluster.ready_nodes())
        cluster.end()


def test_a_group_of_vllm_workers_answers_and_becomes_an_instance() -> None:
    with Laboratory(2, GROUP_LINK, origin_link=LinkSpeed(50e6)) as lab:
        cluster = ClusterWithoutRay(lab, prewarm="vllm=1")
        cluster.start()
        for node in lab.nodes:
            until(lambda node=node: cluster.is_warm(node, "vllm"), cluster.told)
        cluster.start_gateway(8080)
        url = lab.forward(0, "switch", 8080)
        seeds = (None, 7)
        answers = [{one.result()} for one in cluster.ask_for_a_group(url, "vllm", seeds)]
        while "group-consolidated" not in cluster.kinds():
            assert "group-alone" not in cluster.kinds(), cluster.told()
            with ThreadPoolExecutor(2) as pool:
                for found, answer in zip(answers, pool.map(partial(completion, url), seeds), strict=True):
                    found.add(answer)
        until(lambda: len(cluster.instances()) == 1, cluster.told)
        assert answers == [{completion(url, seed)} for seed in seeds]
        until(lambda: cluster.status()["models"][0]["starts"], cluster.told)
        start = cluster.status()["models"][0]["starts"][0]
        assert start["workers"] == 2
        cluster.call("remove", name="m")
        cluster.end()
