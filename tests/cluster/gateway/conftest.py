"""Real gateways in front of real `medusa serve` processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from cluster_stand_in import StandIn, write_token
from fork_server import ForkServer
from gateway_fixtures import NAME, GatewayProcess, Instance


@pytest.fixture
def cluster() -> Iterator[StandIn]:
    with StandIn() as stand_in:
        yield stand_in


@pytest.fixture
def start_gateway(
    cluster: StandIn, tmp_path: Path, cluster_fork_server: ForkServer
) -> Iterator[Callable[..., GatewayProcess]]:
    started: list[GatewayProcess] = []
    token = write_token(tmp_path)

    def start(*arguments: str, wrapper: Sequence[str] = (), ready: bool = True) -> GatewayProcess:
        address = f"127.0.0.1:{cluster.port}"
        fork_server = cluster_fork_server
        started.append(
            GatewayProcess(tmp_path, address, token, *arguments, wrapper=wrapper, ready=ready, fork_server=fork_server)
        )
        return started[-1]

    yield start
    for gateway in started:
        gateway.kill()
        assert "Traceback" not in gateway.output(), gateway.output()


@pytest.fixture
def gateway(
    cluster: StandIn, start_gateway: Callable[..., GatewayProcess], served: tuple[Instance, ...]
) -> GatewayProcess:
    """One with a deployed model and an instance of it."""
    cluster.deploy(NAME)
    cluster.add(NAME, "one", served[0].url)
    return start_gateway()


@pytest.fixture
def start_instance(fork_server: ForkServer) -> Iterator[Callable[..., Instance]]:
    """Start `medusa serve`; it is killed at the end of the test."""
    started: list[Instance] = []

    def start(*arguments: str, ready: bool = True) -> Instance:
        started.append(Instance(*arguments, fork_server=fork_server))
        if ready:
            started[-1].wait_ready()
        return started[-1]

    yield start
    for instance in started:
        instance.signal(signal.SIGCONT)
        instance.close()


@pytest.fixture(scope="package")
def served(fork_server: ForkServer) -> Iterator[tuple[Instance, Instance]]:
    """Two instances that no test harms."""
    both = (Instance(fork_server=fork_server), Instance(fork_server=fork_server))
    for one in both:
        one.wait_ready()
    yield both
    for one in both:
        one.close()
