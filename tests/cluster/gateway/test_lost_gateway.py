"""A gateway that the kernel kills for want of memory, or that stands still: another goes on, nothing is left."""

from __future__ import annotations

import http.client
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, Instance, Stream
from memory_group import MemoryGroup, group
from waiting import until

__all__ = ["group"]

Start = Callable[..., Any]
LONG = {"prompt": "This function returns", "temperature": 0, "ignore_eos": True, "max_tokens": 450}
SHORT = LONG | {"max_tokens": 8}

pytestmark = pytest.mark.slow


class Asking:
    """A client of a gateway, whose connection may break. ``again``: it asks until then, and is never answered."""

    def __init__(self, gateway: GatewayProcess, body: dict[str, Any], again: bool = False) -> None:
        self.answer: Any = None
        self.answered = 0
        self.ended_at = 0.0
        self._again = again
        self._gateway, self._body = gateway, {"model": NAME} | body
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            answer = self._gateway.post("/v1/completions", self._body)
            while self._again:
                self.answered += 1
                self._gateway.post("/v1/completions", self._body)
            self.answer = answer
        except (OSError, http.client.HTTPException) as error:
            self.answer = error
        self.ended_at = time.monotonic()

    def wait(self) -> Any:
        self._thread.join(60)
        return self.answer


@pytest.fixture
def prepare(cluster: StandIn, served: tuple[Instance, ...]) -> Callable[[str], None]:
    """Bring the model into a phase of the gateways' work: an instance is there, or it is waited for."""

    def reach(phase: str) -> None:
        cluster.deploy(NAME)
        if phase != "hold":
            cluster.add(NAME, "one", served[0].url)

    return reach


def running(instance: Instance) -> int:
    metrics = instance.exchange("GET", "/metrics").body.decode()
    found = re.search(r"(?m)^medusa_engine_running(?:\{.*\})? (\d+)", metrics)
    return int(found[1]) if found else 0


@pytest.mark.root
@pytest.mark.parametrize("phase", ["idle", "hold", "stream"])
@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_a_gateway_killed_for_want_of_memory(
    group: MemoryGroup,
    cluster: StandIn,
    start_gateway: Start,
    served: tuple[Instance, ...],
    prepare: Callable[[str], None],
    phase: str,
) -> None:
    prepare(phase)
    victim, other = start_gateway(wrapper=group.inside), start_gateway("--name", "other")
    asking = [Asking(gateway, SHORT) for gateway in (victim, other)] if phase == "hold" else []
    if phase == "hold":
        until(lambda: len([load for load in cluster.loads.values() if load.get(NAME, {}).get("waiting")]) == 2)
    elif phase == "stream":
        asking = [Asking(victim, LONG | {"stream": True}, again=True)]
        until(lambda: asking[0].answered)
    group.kill(victim.process.pid)
    killed_at = time.monotonic()
    assert victim.process.wait(30) == -signal.SIGKILL
    if asking:
        assert isinstance(asking[0].wait(), OSError | http.client.HTTPException)
        assert asking[0].ended_at - killed_at < 5, "its client was told at once"
    if phase == "hold":
        assert asking[1].answer is None
        cluster.add(NAME, "one", served[0].url)
        assert asking[1].wait()[0] == 200
    assert other.post("/v1/completions", {"model": NAME} | SHORT)[0] == 200
    until(lambda: running(served[0]) == 0)
    again = start_gateway(wrapper=group.inside)
    assert again.post("/v1/completions", {"model": NAME} | SHORT)[0] == 200
    assert again.stop() == 0
    assert other.stop() == 0
    assert group.kills() == 1


@pytest.mark.parametrize("phase", ["idle", "hold", "stream"])
def test_a_gateway_that_stands_still_holds_up_its_own_clients_only(
    cluster: StandIn,
    start_gateway: Start,
    served: tuple[Instance, ...],
    prepare: Callable[[str], None],
    phase: str,
) -> None:
    prepare(phase)
    victim, other = start_gateway(), start_gateway("--name", "other")
    asking = [Asking(gateway, SHORT) for gateway in (victim, other)] if phase == "hold" else []
    if phase == "stream":
        streams = [Stream(gateway, "/v1/completions", LONG) for gateway in (victim, other)]
        for stream in streams:
            stream.take(3)
    os.kill(victim.process.pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    if phase == "hold":
        cluster.add(NAME, "one", served[0].url)
        assert asking[1].wait()[0] == 200
    elif phase == "stream":
        streams[1].rest()
        assert streams[1].error is None
    assert other.post("/v1/completions", {"model": NAME} | SHORT)[0] == 200
    print(f"{phase}: the other gateway had answered {time.monotonic() - stopped_at:.2f} s after the stop")
    os.kill(victim.process.pid, signal.SIGCONT)
    if phase == "hold":
        assert asking[0].wait()[0] == 200
    elif phase == "stream":
        streams[0].rest()
        assert streams[0].error is None
    assert victim.post("/v1/completions", {"model": NAME} | SHORT)[0] == 200
    until(lambda: running(served[0]) == 0)
