"""The wall clock of a head and of a gateway is set while they run, as NTP does at a boot or after a VM was stopped."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cluster_nodes import MODEL, ClusterNode
from gateway_fixtures import GatewayProcess
from shifted_clock import ShiftedClock
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HOUR_S = 3600
_PATIENCE_S = 240.0  # nothing is proved by it: a machine may be slow


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> ShiftedClock:
    return ShiftedClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def head(clock: ShiftedClock) -> Iterator[ClusterNode]:
    """The head of a cluster of two, whose other node has the machine's clock."""
    head = ClusterNode("head", 0, environ=clock.environ)
    other = None
    try:
        head.wait_ready()
        other = ClusterNode("n1", 1, head).wait_ready()
        until(lambda: head.status_of("n1").get("state") == "alive", head.output)
        yield head
    finally:
        for node in (other, head):
            if node is not None:
                node.close()


@pytest.fixture(scope="module")
def gateway(head: ClusterNode, clock: ShiftedClock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    wrapper = ["env", *(f"{name}={value}" for name, value in clock.environ.items())]
    started = GatewayProcess(tmp_path_factory.mktemp("gateway"), head.address, head.token_file, wrapper=wrapper)
    yield started
    started.kill()


def ask(gateway: GatewayProcess, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{gateway.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
        assert answer.status == 200


@contextmanager
def busy(gateway: GatewayProcess, *models: str) -> Iterator[None]:
    """Send requests to these models, one after the other, for as long as the block runs."""
    done = threading.Event()

    def run(model: str) -> None:
        while not done.is_set():
            gateway.post("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 50, "ignore_eos": True})

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_clock_that_is_set_ends_nothing(clock: ShiftedClock, head: ClusterNode, gateway: GatewayProcess) -> None:
    head.call("deploy", name="kept", url=str(MODEL), min=2, max=2)
    until(lambda: head.call("status")["models"][0]["instances"] == 2, head.output)
    for shift_s in (HOUR_S, -HOUR_S, 0):
        clock.set(shift_s)
        before = {node["name"]: node for node in head.call("status")["nodes"]}
        asked = head.call("status")["at"]
        until(lambda asked=asked: head.call("status")["at"] > asked + 5, head.output)  # twice what makes a node lost
        ask(gateway, "kept")
        status = head.call("status")
        for node in status["nodes"]:
            assert node["state"] == "alive"
            (instance,), (known,) = node["instances"], before[node["name"]]["instances"]
            assert (instance["id"], instance["state"]) == (known["id"], "ready")
            assert instance["since"] == pytest.approx(known["since"], abs=1), "by the clock as it is set now"
        assert all(status["at"] - 600 < event["at"] <= status["at"] for event in status["events"])
        assert len(status["gateways"]) == 1
        assert not {"node-lost", "instance-died", "instance-ended"} & {event["kind"] for event in status["events"]}
    assert " for " in head.medusa("status").stdout
    head.call("remove", name="kept")
    until(lambda: not any(node["instances"] for node in head.call("status")["nodes"]), head.output)


def test_turns_and_idle_times_are_no_longer_after_a_clock_was_set_back(
    clock: ShiftedClock, head: ClusterNode, gateway: GatewayProcess
) -> None:
    """Three models share two nodes, of which two always have requests."""
    clock.set(0)
    for name in ("a", "b", "late"):
        head.call("deploy", name=name, url=str(MODEL), max=1)
    with busy(gateway, "a", "b"):
        until(lambda: head.ready_instance("a") and head.ready_instance("b"), head.output)
        clock.set(-HOUR_S)
        ask(gateway, "late")
    until(lambda: not any(node["instances"] for node in head.call("status")["nodes"]), head.output)
    for name in ("a", "b", "late"):
        head.call("remove", name=name)
