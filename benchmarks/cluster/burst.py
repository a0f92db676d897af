"""A burst on one model. Its instances go from one to one per node and back, and no answer may change."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_runtime.errors import LabError

from benchmarks.cluster.asking import ask
from benchmarks.cluster.options import Options
from benchmarks.result_row import row
from benchmarks.waiting import until

_NAME, _PORT = "model", 8080
_PROMPTS = 16
_TOKENS = 96
_PLACES = 4  # requests that an instance works on at the same time
_CLIENTS = 2  # for each of these places, so that some requests wait even when all instances are ready
_GROWN_WITHIN_S, _SHRUNK_WITHIN_S, _READY_WITHIN_S = 180.0, 120.0, 180.0
_STAY_S = 5.0  # how long all instances stay under load


def rows(options: Options) -> list[dict[str, Any]]:
    """Run bursts.

    A request is lost when its answer is an error, or differs from the answer before the burst (it is then also counted
    as changed).
    """
    with _cluster(options) as cluster:
        expected = [_complete(cluster, number) for number in range(_PROMPTS)]
        found = [_burst(cluster, options.nodes, expected) for _ in range(options.runs)]
    return [
        row("burst", "lost", "", [one.lost for one in found]),
        row("burst", "changed", "", [one.changed for one in found]),
        row("burst", "requests", "", [one.requests for one in found]),
        row("burst", "instances", "", [one.most_instances for one in found]),
        row("burst", "grown_s", "s", [one.grown_s for one in found]),
        row("burst", "shrunk_s", "s", [one.shrunk_s for one in found]),
    ]


@dataclass
class _Burst:
    """The counts and times of one burst."""

    requests: int = 0
    lost: int = 0
    changed: int = 0
    most_instances: int = 0
    grown_s: float = 0.0
    shrunk_s: float = 0.0
    errors: list[str] = field(default_factory=list)


@contextmanager
def _cluster(options: Options) -> Iterator[LabCluster]:
    """Start a cluster with a gateway and one instance. It stops when the context ends."""
    link = LinkSpeed(options.link_bytes_per_s)
    with Laboratory(options.nodes, link, cpus=options.cpus, origin={_NAME: options.model}) as lab:
        cluster = LabCluster(lab)
        cluster.start()
        cluster.start_gateway(_PORT)
        cluster.deploy(_NAME, min=1, max=options.nodes, settings={"max_concurrency": str(_PLACES)})
        until(lambda: _instances(cluster) >= 1, _READY_WITHIN_S, "an instance")
        yield cluster
        cluster.stop()


def _burst(cluster: LabCluster, nodes: int, expected: list[str]) -> _Burst:
    until(lambda: _instances(cluster) == 1, _SHRUNK_WITHIN_S, "a single instance")
    found, ending, lock = _Burst(), threading.Event(), threading.Lock()

    def ask(first: int) -> None:
        number = first
        while not ending.is_set():
            try:
                text, error = _complete(cluster, number % _PROMPTS), ""
            except (LabError, OSError, http.client.HTTPException, ValueError) as caught:
                text, error = "", repr(caught)
            changed = not error and text != expected[number % _PROMPTS]
            with lock:
                found.requests += 1
                found.lost += bool(error) or changed
                found.changed += changed
                found.errors += [error] if error else []
            number += 1

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(_CLIENTS * _PLACES * nodes)]
    began = time.monotonic()
    for client in clients:
        client.start()
    try:
        deadline = began + _GROWN_WITHIN_S
        while found.most_instances < nodes and time.monotonic() < deadline:
            found.most_instances = max(found.most_instances, _instances(cluster))
            time.sleep(0.2)
        found.grown_s = time.monotonic() - began
        time.sleep(_STAY_S)
    finally:
        ending.set()
        for client in clients:
            client.join()
    ended = time.monotonic()
    until(lambda: _instances(cluster) == 1, _SHRUNK_WITHIN_S, "a single instance again")
    found.shrunk_s = time.monotonic() - ended
    for error in found.errors[:3]:
        print(f"lost: {error}")
    return found


def _instances(cluster: LabCluster) -> int:
    """Return how many instances are ready."""
    model = next(model for model in cluster.status()["models"] if model["name"] == _NAME)
    return int(model["instances"])


def _complete(cluster: LabCluster, number: int) -> str:
    """Send the request with this number to the gateway, and return the text. Raises LabError for an error.

    Every second request is streamed, and two of four use temperature 0.
    """
    sampling = {"temperature": 0} if number % 4 < 2 else {"temperature": 1, "seed": number}
    body = {
        "model": _NAME, "prompt": f"Number {number} is", "max_tokens": _TOKENS, "ignore_eos": True,
        "stream": number % 2 == 1,
    }  # fmt: skip
    answer = ask(cluster, _PORT, body | sampling)
    return _streamed(answer) if body["stream"] else str(json.loads(answer)["choices"][0]["text"])


def _streamed(answer: bytes) -> str:
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise LabError("the stream ended early")
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        raise LabError(f"the stream ended with {chunks[-1]}")
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)
