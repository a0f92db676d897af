"""Requests that are answered while a second instance loads, if it helps the first one and if it only loads."""

from __future__ import annotations

import threading
import time
from typing import Any

from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_runtime.container_limits import cpu_count

from benchmarks.cluster.asking import ask
from benchmarks.cluster.options import Options
from benchmarks.result_row import row
from benchmarks.waiting import until

_NAME, _PORT = "model", 8080
_CORES = 0.4  # the default share of the machine for a node; the rest is for the gateway and the clients
_LOAD_S = 8.0  # how long a copy takes on the link, which also carries the keys and values of prompts
_CLIENTS = 12
_PLACES = 8  # requests that an instance works on at the same time
_PROMPT_TOKENS = 256
_WITHIN_S = 180.0


def rows(options: Options) -> list[dict[str, Any]]:
    """Measure requests per second while the second instance loads its weights, helping or not, in turn."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for run in range(options.runs):
        for live in (True, False) if run % 2 else (False, True):
            found[live].append(_throughput(options, live=live))
    ratios = [helping / loading for helping, loading in zip(found[True], found[False], strict=True)]
    return [
        row("live-only-loads", "requests_per_s", "1/s", found[False]),
        row("live-helps", "requests_per_s", "1/s", found[True]),
        row("live", "throughput_ratio", "ratio", ratios),
    ]


def _throughput(options: Options, *, live: bool) -> float:
    size = sum(path.stat().st_size for path in options.model.glob("*.safetensors"))
    cpus = options.cpus or _CORES * cpu_count()
    with Laboratory(2, LinkSpeed(size / _LOAD_S), cpus=cpus, origin={_NAME: options.model}) as lab:
        cluster = LabCluster(lab)
        cluster.start()
        settings = {"max_concurrency": str(_PLACES), "threads": "1"}
        cluster.deploy(_NAME, max=2, live_scaling=live, settings=settings)
        cluster.start_gateway(_PORT)
        _ask(cluster, 0)
        ending, answered = threading.Event(), [0] * _CLIENTS

        def client(place: int) -> None:
            while not ending.is_set():
                _ask(cluster, place)
                answered[place] += 1

        clients = [threading.Thread(target=client, args=(place,)) for place in range(_CLIENTS)]
        for one in clients:
            one.start()
        try:
            until(lambda: len(_copies(cluster)) == 2, _WITHIN_S, "a second instance")
            began, before = time.monotonic(), sum(answered)
            until(lambda: _is_complete(_copies(cluster)), _WITHIN_S, "the second copy")
            return (sum(answered) - before) / (time.monotonic() - began)
        finally:
            ending.set()
            for one in clients:
                one.join()
            cluster.stop()


def _copies(cluster: LabCluster) -> list[Any]:
    return [model for node in cluster.status()["nodes"] if node["instances"] for model in node["models"]]


def _is_complete(copies: list[Any]) -> bool:
    return all(copy["state"] == "done" for copy in copies)


def _ask(cluster: LabCluster, number: int) -> None:
    """Request one token after a long prompt from the gateway. Raises LabError for an answer that is an error."""
    prompt = [3 + (number + 7 * place) % 900 for place in range(_PROMPT_TOKENS)]
    ask(cluster, _PORT, {"model": _NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0})
