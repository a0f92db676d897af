"""A cluster in a laboratory starts a model as a group: the group answers, and one instance goes on."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab_cluster import (
    EXAMPLE,
    GROUP_LINK,
    GROUP_SLO_S,
    ClusterOfGpus,
    ClusterOfPairsOfGpus,
    ClusterWithoutRay,
    ClusterWithRay,
    completion,
)
from medusa_cluster.json_lines import call
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
]

_CLIENTS = 12
_SHORT = "This function returns"
_LONG = " ".join([_SHORT] * 50)  # takes a second or so over a link


@pytest.mark.parametrize("kind", [ClusterWithoutRay, ClusterWithRay, ClusterOfPairsOfGpus])
def test_a_group_answers_and_becomes_an_instance(kind: type[ClusterWithRay]) -> None:
    with Laboratory(3, GROUP_LINK, origin_link=LinkSpeed(50e6)) as lab:
        cluster = kind(lab)
        url = _started(cluster)
        (asked,) = cluster.ask_for_a_group(url, "torch")
        by_group = asked.result()
        assert "group-alone" not in cluster.kinds(), cluster.told()
        until(lambda: "group-consolidated" in cluster.kinds(), cluster.told)
        until(lambda: len(cluster.instances()) == 1, cluster.told)
        assert completion(url) == by_group
        until(lambda: cluster.status()["models"][0]["starts"], cluster.told)
        start = cluster.status()["models"][0]["starts"][0]
        assert start["workers"] > 1
        assert 0 < start["predicted_s"] < GROUP_SLO_S
        (left,) = cluster.instances()
        stages = [stage for stage in _timeline(cluster, left["id"]) if stage["name"] == "device"]
        leader = [stage["detail"]["visible"] for stage in stages if not stage["process"].startswith("worker")]
        assert (len(stages), leader) == ((start["workers"], ["0"]) if kind is ClusterOfPairsOfGpus else (0, []))
        free = [1, 2, 2] if kind is ClusterOfPairsOfGpus else [0, 0, 0]
        until(lambda: _free_gpus(cluster) == free, cluster.told)  # a node shows one again once its memory is free
        cluster.call("remove", name="m")
        cluster.end()


@pytest.mark.parametrize("kind", [ClusterWithoutRay, ClusterOfGpus])
def test_a_new_instance_helps_a_loaded_one_until_it_has_its_layers(kind: type[ClusterWithRay]) -> None:
    with _live_cluster(kind) as (cluster, url, alone):
        (first,) = cluster.instances()

        helps = []
        with ThreadPoolExecutor(_CLIENTS) as pool:
            asked = [pool.submit(_ask_until, lambda: _ready(cluster) == 2, url) for _ in range(_CLIENTS)]
            while not all(one.done() for one in asked):
                helps += [item["helps"] for item in _shown(cluster) if item["helps"]]
                time.sleep(0.2)
        assert set(helps) == {first["id"]}, cluster.told()
        assert {text for one in asked for text in one.result()} == {alone}
        assert {item["helps"] for item in _shown(cluster)} == {None}
        marks = _marks(cluster, first["id"])
        assert marks.index("paired") < marks.index("unpaired"), marks
        assert completion(url) == alone
        cluster.end()


@pytest.mark.parametrize("victim", ["source", "helper"])
def test_a_stopped_live_instance_costs_no_request(victim: str) -> None:
    with _live_cluster() as (cluster, url, alone):
        lab = cluster.lab
        (source,) = cluster.instances()
        source_node = next(node["name"] for node in cluster.status()["nodes"] if node["instances"])

        with _clients(url, alone):
            until(lambda: "paired" in _marks(cluster, source["id"]), cluster.told)
            others = [node for node in lab.nodes if node != source_node]
            began = time.monotonic()
            _stop_instance(lab, source_node if victim == "source" else others[0])
            until(lambda: "instance-died" in cluster.kinds(), cluster.told)
            until(lambda: _ready(cluster) == 2, cluster.told)
        print(f"two instances again, and no request left, {time.monotonic() - began:.1f} s after the signal")
        cluster.end()


@pytest.mark.parametrize("kind", [ClusterWithoutRay, ClusterWithRay])
@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_prefill_and_decode_apart_answer_as_one_instance_also_when_either_is_lost(
    victim: str, kind: type[ClusterWithRay]
) -> None:
    with Laboratory(3, GROUP_LINK, origin={"m": EXAMPLE}) as lab:
        cluster = kind(lab)
        url = _started(cluster)
        cluster.deploy("m", max=1, disaggregated=True, settings=kind.settings | {"max_concurrency": "8"})
        alone = completion(url)
        with _clients(url, alone):
            prefill = _wait_prefilling(cluster)
            time.sleep(2)  # with prompts that another instance prefills
            lost = prefill["helps"] if victim == "decode" else prefill["id"]
            places = {item["id"]: node["name"] for node in cluster.status()["nodes"] for item in node["instances"]}
            _stop_instance(lab, places[lost])
            until(lambda: lost not in [item["id"] for item in _shown(cluster)], cluster.told)
            prefill = _wait_prefilling(cluster)
            assert lost not in (prefill["id"], prefill["helps"])
        cluster.call("remove", name="m")
        until(lambda: not _shown(cluster), cluster.told)
        cluster.end()


@pytest.mark.parametrize("victim", ["loading", "loaded"])
def test_one_that_loads_relieves_another_one_that_prefills_also_when_either_is_lost(victim: str) -> None:
    with Laboratory(4, GROUP_LINK, origin={"m": EXAMPLE}) as lab:
        cluster = ClusterWithoutRay(lab)
        url = _started(cluster)
        settings = cluster.settings | {"max_concurrency": "8", "prefix_cache_mb": "0"}  # each prompt is computed
        flags = {"disaggregated": True, "live_scaling": True, "settings": settings}
        cluster.deploy("m", max=1, **flags)
        alone = completion(url, prompt=_LONG)
        prefill = _wait_prefilling(cluster)
        cluster.deploy("m", max=2, **flags)

        def relieving() -> list[Any]:
            said = [event for event in cluster.status()["events"] if "at first with the layers" in event["text"]]
            return [item for item in _shown(cluster) if any(item["id"] in event["text"] for event in said)]

        with _clients(url, alone, _LONG):
            until(relieving, cluster.told)
            loading = relieving()[0]
            until(lambda: "relieved" in _marks(cluster, prefill["helps"]), cluster.told)
            lost = loading["id"] if victim == "loading" else prefill["id"]
            places = {item["id"]: node["name"] for node in cluster.status()["nodes"] for item in node["instances"]}
            _stop_instance(lab, places[lost])
            until(lambda: lost not in [item["id"] for item in _shown(cluster)], cluster.told)
            until(lambda: len([item for item in _shown(cluster) if item["helps"]]) > 0, cluster.told)
        cluster.call("remove", name="m")
        until(lambda: not _shown(cluster), cluster.told)
        cluster.end()


def test_an_instance_that_prefills_is_ended_while_prompts_run_and_no_request_is_lost() -> None:
    """Its node drains: it hands over what it has begun, and another one prefills."""
    with Laboratory(3, GROUP_LINK, origin={"m": EXAMPLE}) as lab:
        cluster = ClusterWithoutRay(lab)
        url = _started(cluster)
        cluster.deploy("m", max=1, disaggregated=True, settings=cluster.settings | {"max_concurrency": "8"})
        alone = completion(url)
        with _clients(url, alone):
            first = _wait_prefilling(cluster)
            time.sleep(2)  # with prompts that another instance prefills
            nodes = cluster.status()["nodes"]
            place = next(node["name"] for node in nodes for item in node["instances"] if item["id"] == first["id"])
            drain = {"op": "cluster", "call": "drain", "arguments": {"node": place}}
            asyncio.run(call(lab.node_folder(cluster.head) / "control.sock", drain))
            until(lambda: first["id"] not in [item["id"] for item in _shown(cluster)], cluster.told)
            _wait_prefilling(cluster)
        assert not {"instance-died", "start-failed"} & set(cluster.kinds()), cluster.told()
        stages = _timeline(cluster, first["helps"])
        parted = [stage["detail"]["reason"] for stage in stages if stage["name"] == "unpaired"]
        assert set(parted) == {"both are instances"}, cluster.told()
        cluster.end()


def _wait_prefilling(cluster: ClusterWithRay) -> dict[str, Any]:
    """Wait until one instance prefills for another one, which knows of it, and return it."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = [item for item in _shown(cluster) if item["helps"]]
        try:
            if len(found) != 1 or "prefilling" not in _marks(cluster, found[0]["id"]):
                return False
            return "paired" in _marks(cluster, found[0]["helps"])
        except (KeyError, StopIteration):  # one of the two has just ended
            return False

    until(look, cluster.told)
    return found[0]


def _started(cluster: ClusterWithRay) -> str:
    """Start a cluster whose nodes are warm, and a gateway; the gateway's URL."""
    cluster.start()
    for node in cluster.lab.nodes:
        until(lambda node=node: cluster.is_warm(node))
    cluster.start_gateway(8080)
    return cluster.lab.forward(0, "switch", 8080)


@contextmanager
def _live_cluster(kind: type[ClusterWithRay] = ClusterWithoutRay) -> Iterator[tuple[ClusterWithRay, str, str]]:
    """A cluster of two nodes, whose one instance may be helped; its gateway's URL, and what that instance answers."""
    with Laboratory(2, GROUP_LINK, origin={"m": EXAMPLE}) as lab:
        cluster = kind(lab)
        url = _started(cluster)
        cluster.deploy("m", max=2, live_scaling=True, settings=kind.settings | {"max_concurrency": "4"})
        yield cluster, url, completion(url)


def _stop_instance(lab: Laboratory, node: str) -> None:
    """SIGSTOP all processes of the node's instance: those of `medusa serve`, and its engine."""
    for pid, line in lab.processes(node).items():
        if " serve " in line or Path(f"/proc/{pid}/comm").read_text() == "engine\n":
            os.kill(pid, signal.SIGSTOP)


def _marks(cluster: ClusterWithRay, instance: str) -> list[str]:
    return [stage["name"] for stage in _timeline(cluster, instance)]


@contextmanager
def _clients(url: str, alone: str, prompt: str = _SHORT) -> Iterator[None]:
    """Let clients ask again and again until the context ends. Each answer has to be ``alone``."""
    ended = threading.Event()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        asked = [pool.submit(_ask_until, ended.is_set, url, prompt) for _ in range(_CLIENTS)]
        try:
            yield
        finally:
            ended.set()
    assert {text for one in asked for text in one.result()} == {alone}


def _ask_until(enough: Callable[[], bool], url: str, prompt: str = _SHORT) -> list[str]:
    """Ask again and again, and once more when it is enough; all answers."""
    answers = []
    while not enough():
        answers.append(completion(url, prompt=prompt))
    return [*answers, completion(url, prompt=prompt)]


def _shown(cluster: ClusterWithRay) -> list[Any]:
    return [item for node in cluster.status()["nodes"] for item in node["instances"]]


def _ready(cluster: ClusterWithRay) -> int:
    """Return how many instances answer requests, by the controller."""
    return int(cluster.status()["models"][0]["instances"])


def _free_gpus(cluster: ClusterWithRay) -> list[int]:
    """Return how many GPUs are free on each node, in order of these numbers."""
    return sorted(len(node["device_free_bytes"]) for node in cluster.status()["nodes"])


def _timeline(cluster: ClusterWithRay, instance: str) -> list[Any]:
    """The stages of an instance, on whatever node it is."""
    nodes = cluster.status()["nodes"]
    place = next(node["name"] for node in nodes if instance in [item["id"] for item in node["instances"]])
    with cluster.lab.network("switch"):
        connection = http.client.HTTPConnection(cluster.lab.address(place), 8114, timeout=20)
        connection.connect()
    with closing(connection):
        headers = {"Authorization": f"Bearer {cluster.token}"}
        connection.request("GET", f"/instances/{instance}/timeline", headers=headers)
        return list(json.load(connection.getresponse())["stages"])
