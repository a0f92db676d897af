"""Requests to a real cluster, while its processes, nodes and links fail: none is lost, and no token is wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from faulty_cluster import FaultyCluster, Traffic, until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Ray takes its time on a busy machine
]

MODEL = "pydoc-lm"
HEAD, OTHER = "n1", "n2"
# Where a process runs, and by what it is found in its command line or as its name.
AGENT = "medusa_adapters node"
NODE_ACTOR = "ray::NodeActor"
CONTROLLER = "ray::Controller"
GCS = "gcs_server"
RAYLET = "raylet"
INSTANCE = "medusa_adapters serve"
NODE_SERVER = "cluster start"
WORKED_S = 6.0  # of traffic beside a fault


class Cluster:
    """Three nodes with two instances of the example, two gateways, and their URLs."""

    def __init__(self, cluster: FaultyCluster) -> None:
        self.cluster = cluster
        self.lab = cluster.lab
        self.urls = [self._gateway(port) for port in (8080, 8081)]
        cluster.deploy(MODEL, min=2, max=3)
        self.recover()

    def _gateway(self, port: int) -> str:
        self.cluster.start_gateway(port)
        return self.lab.forward(0, "switch", port)

    def traffic(self) -> Traffic:
        return Traffic(self.urls[0], MODEL)

    def recover(self) -> None:
        """All nodes are alive, and two instances or more serve."""
        self.cluster.wait_nodes()
        until(lambda: len(self.cluster.instances()) >= 2, self.cluster.describe)


@pytest.fixture(scope="module")
def running(faulty_cluster: FaultyCluster) -> Iterator[Cluster]:
    yield Cluster(faulty_cluster)
    faulty_cluster.call("remove", name=MODEL)


@pytest.fixture
def faulty(running: Cluster) -> Iterator[Cluster]:
    running.recover()
    yield running
    running.recover()


@pytest.mark.parametrize(
    ("node", "words"),
    [
        pytest.param(OTHER, AGENT, id="agent"),
        pytest.param(OTHER, NODE_ACTOR, id="node-actor"),
        pytest.param(OTHER, RAYLET, id="raylet"),
        pytest.param(OTHER, INSTANCE, id="instance"),
        pytest.param(HEAD, CONTROLLER, id="controller"),
        pytest.param(HEAD, GCS, id="gcs"),
    ],
)
def test_a_process_that_is_killed_loses_no_request_and_comes_back(faulty: Cluster, node: str, words: str) -> None:
    if words == INSTANCE:
        node = faulty.cluster.instances()[0]
    with faulty.traffic() as traffic:
        traffic.wait_for(2)
        killed = faulty.cluster.signal(node, words, signal.SIGKILL)
        time.sleep(WORKED_S)
        traffic.wait_for(2)
        faulty.recover()
        until(lambda: set(faulty.cluster.pids(node, words)) - set(killed) or words == INSTANCE)
    traffic.check()


@pytest.mark.parametrize(
    ("node", "words"),
    [
        pytest.param(OTHER, AGENT, id="agent"),
        pytest.param(OTHER, NODE_ACTOR, id="node-actor"),
        pytest.param(OTHER, INSTANCE, id="instance"),
        pytest.param(OTHER, NODE_SERVER, id="node-server"),
        pytest.param(HEAD, CONTROLLER, id="controller"),
        pytest.param(HEAD, GCS, id="gcs"),
    ],
)
def test_a_process_that_is_stopped_for_a_while_loses_no_request(faulty: Cluster, node: str, words: str) -> None:
    if words == INSTANCE:
        node = faulty.cluster.instances()[0]
    with faulty.traffic() as traffic:
        traffic.wait_for(2)
        stopped = faulty.cluster.signal(node, words, signal.SIGSTOP)
        try:
            time.sleep(WORKED_S)
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        traffic.wait_for(2)
        faulty.recover()
    traffic.check()


def test_a_gateway_that_is_killed_is_nothing_to_the_other(faulty: Cluster) -> None:
    with faulty.traffic() as traffic, Traffic(faulty.urls[1], MODEL, clients=1) as other:
        traffic.wait_for(2)
        other.wait_for(1)
        faulty.cluster.gateways[1].kill()
        traffic.wait_for(4)
    traffic.check()
    assert other.answers[-1].status == 0
    faulty.cluster.start_gateway(8081)
    until(lambda: Traffic(faulty.urls[1], MODEL).ask()[0] == 200)  # it has to hear first what is deployed


@pytest.mark.parametrize("seconds", [1, 10, 60])
def test_a_link_that_is_cut_loses_no_request(faulty: Cluster, seconds: float) -> None:
    node = next(name for name in faulty.cluster.instances() if name != HEAD)
    with faulty.traffic() as traffic:
        traffic.wait_for(2)
        faulty.lab.cut(node)
        try:
            time.sleep(seconds)
        finally:
            faulty.lab.restore(node)
        traffic.wait_for(2)
        faulty.recover()
    traffic.check()


def test_a_node_that_loses_its_power_loses_no_request_and_joins_again(faulty: Cluster) -> None:
    node = next(name for name in faulty.cluster.instances() if name != HEAD)
    with faulty.traffic() as traffic:
        traffic.wait_for(2)
        faulty.lab.crash(node)
        traffic.wait_for(4)
        faulty.lab.boot(node)
        faulty.cluster.start_node(node)
        faulty.cluster.wait_ready(node)
        faulty.recover()
    traffic.check()


def test_a_node_server_that_is_killed_leaves_nothing_running(faulty: Cluster) -> None:
    with faulty.traffic() as traffic:
        traffic.wait_for(2)
        faulty.cluster.signal(OTHER, NODE_SERVER, signal.SIGKILL)
        traffic.wait_for(4)
        until(lambda: not faulty.lab.processes(OTHER), lambda: faulty.lab.processes(OTHER))
        faulty.cluster.start_node(OTHER)
        faulty.cluster.wait_ready(OTHER)
        faulty.recover()
    traffic.check()


def test_the_head_comes_back_with_what_was_deployed(faulty: Cluster) -> None:
    with faulty.traffic() as traffic:
        traffic.wait_for(2)
        faulty.cluster.signal(HEAD, NODE_SERVER, signal.SIGKILL)
        until(lambda: not faulty.lab.processes(HEAD), lambda: faulty.lab.processes(HEAD))
        traffic.wait_for(4)  # by instances on other nodes
        faulty.cluster.start_node(HEAD)
        faulty.cluster.wait_ready(HEAD)
        faulty.recover()
        assert faulty.cluster.model(MODEL)["min"] == 2
    traffic.check()
