"""What a chain costs on this machine at least: bare relays, which receive and send and do nothing else."""

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


class Bare(NamedTuple):
    """A chain of bare relays: seconds until the last one had everything, each hop's bytes and CPU seconds."""

    seconds: float
    bytes_per_s: list[float]
    cpu_s: float


def bare_chain(lab: Laboratory, nodes: Sequence[str], size_bytes: int) -> Bare:
    """Pass so many bytes from the first node to the last, through each between them."""
    relays = [
        _start(lab, node, *(nodes[place + 1 : place + 2]), size=size_bytes, first=not place)
        for place, node in enumerate(nodes)
    ]
    try:
        for relay in relays:
            _line(relay)
        for relay in relays:
            _go(relay)
        for relay in relays:
            _line(relay)
        began = time.monotonic()
        for relay in reversed(relays):
            _go(relay)
        found = [json.loads(_line(relay)) for relay in relays]
        for relay in relays:
            _go(relay)
    finally:
        for relay in relays:
            relay.terminate()
            relay.wait()
    received = found[1:]
    return Bare(
        max(each["ended_s"] for each in received) - began,
        [size_bytes / (each["ended_s"] - each["first_s"]) for each in received],
        sum(each["cpu_s"] for each in found),
    )


def _start(lab: Laboratory, node: str, onward: str = "", *, size: int, first: bool) -> subprocess.Popen[str]:
    listen = "-" if first else f"{lab.address(node)}:{_PORT}"
    target = f"{lab.address(onward)}:{_PORT}" if onward else "-"
    command = [sys.executable, "-m", "benchmarks.cluster.bare_relay", str(size), listen, target]
    return lab.popen(node, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _go(relay: subprocess.Popen[str]) -> None:
    assert relay.stdin
    relay.stdin.write("\n")
    relay.stdin.flush()


def _line(relay: subprocess.Popen[str]) -> str:
    assert relay.stdout
    line = relay.stdout.readline()
    if not line:
        raise LabError("a bare relay has ended; its message is above")
    return line
