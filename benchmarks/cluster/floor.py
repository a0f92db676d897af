"""The least time that a chain takes on this machine, measured with relays that only receive and send."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from medusa_cluster.lab.laboratory import Laboratory
from medusa_runtime.errors import LabError

_PORT = 8115
_FIRST_BYTES = 256 << 10  # how much a relay has received when it notes the time of its first bytes


class BareChain(NamedTuple):
    """The seconds until the last relay had everything, the rate of each hop, and the CPU seconds of all relays."""

    seconds: float
    bytes_per_s: list[float]
    cpu_s: float


def bare_chain(lab: Laboratory, nodes: Sequence[str], size_bytes: int) -> BareChain:
    """Pass ``size_bytes`` from the first node to the last, through each node between them."""
    relays = [_start(lab, nodes, place, size_bytes) for place in range(len(nodes))]
    try:
        for _ in ("listening", "connected"):
            _lines(relays)
            began = time.monotonic()
            for relay in reversed(relays):
                _go_on(relay)
        found = [json.loads(line) for line in _lines(relays)]
    finally:
        for relay in relays:
            relay.kill()
            relay.communicate()  # also closes its pipes
    received = found[1:]
    return BareChain(
        max(one["ended_s"] for one in received) - began,
        [(size_bytes - _FIRST_BYTES) / (one["ended_s"] - one["first_s"]) for one in received],
        sum(one["cpu_s"] for one in found),
    )


def _start(lab: Laboratory, nodes: Sequence[str], place: int, size_bytes: int) -> subprocess.Popen[str]:
    listen = f"{lab.address(nodes[place])}:{_PORT}" if place else "-"
    target = f"{lab.address(nodes[place + 1])}:{_PORT}" if place + 1 < len(nodes) else "-"
    command = [sys.executable, "-m", "benchmarks.cluster.bare_relay", str(size_bytes), listen, target]
    return lab.popen(nodes[place], command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _lines(relays: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Read a line from each relay."""
    found = []
    for relay in relays:
        assert relay.stdout
        found.append(relay.stdout.readline())
        if not found[-1]:
            raise LabError("a bare relay has ended; its message is above")
    return found


def _go_on(relay: subprocess.Popen[str]) -> None:
    assert relay.stdin
    relay.stdin.write("\n")
    relay.stdin.flush()


__all__ = ["BareChain", "bare_chain"]
