"""A model that is deployed again while it is asked: the longest request, and those that were lost."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
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
_BODY = {"model": _NAME, "prompt": "Number one is", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
_WITHIN_S = 180.0
_BEFORE_S, _AFTER_S = 3.0, 2.0


def rows(options: Options) -> list[dict[str, Any]]:
    """Deploy the model again and again, each time with another option, and ask it one request after the other."""
    usual: list[float] = []
    longest: list[float] = []
    lost: list[float] = []
    with _cluster(options) as cluster:
        for number in range(options.runs):
            times = _Times(cluster)
            with times.asking():
                time.sleep(_BEFORE_S)
                old = _instances(cluster)
                usual.append(median(times.found) * 1e3)
                _deploy(cluster, 9 + number)
                until(lambda old=old: _replaced(cluster, old), _WITHIN_S, "another instance")  # type: ignore[misc]
                time.sleep(_AFTER_S)
            longest.append(max(times.found) * 1e3)
            lost.append(times.lost)
    return [
        row("redeploy", "lost", "", lost),
        row("redeploy", "longest_ms", "ms", longest),
        row("redeploy", "usual_ms", "ms", usual),
    ]


class _Times:
    """The seconds that requests took, each sent after the answer to the last one."""

    def __init__(self, cluster: LabCluster) -> None:
        self._cluster = cluster
        self.found: list[float] = []
        self.lost = 0

    @contextmanager
    def asking(self) -> Iterator[None]:
        ending = threading.Event()
        client = threading.Thread(target=self._ask, args=(ending,))
        client.start()
        try:
            yield
        finally:
            ending.set()
            client.join()

    def _ask(self, ending: threading.Event) -> None:
        while not ending.is_set():
            began = time.monotonic()
            try:
                ask(self._cluster, _PORT, _BODY)
            except (LabError, OSError, http.client.HTTPException) as error:
                self.lost += 1
                print(f"lost: {error}")
            self.found.append(time.monotonic() - began)


@contextmanager
def _cluster(options: Options) -> Iterator[LabCluster]:
    """Start a cluster with a gateway and one instance. It stops when the context ends."""
    with Laboratory(
        options.nodes, LinkSpeed(options.link_bytes_per_s), cpus=options.cpus, origin={_NAME: options.model}
    ) as lab:
        cluster = LabCluster(lab)
        cluster.start()
        cluster.start_gateway(_PORT)
        _deploy(cluster, 8)
        until(lambda: len(_instances(cluster)) == 1, _WITHIN_S, "an instance")
        ask(cluster, _PORT, _BODY)
        yield cluster
        cluster.stop()


def _deploy(cluster: LabCluster, concurrency: int) -> None:
    cluster.deploy(_NAME, min=1, settings={"max_concurrency": str(concurrency)})


def _instances(cluster: LabCluster) -> set[str]:
    return {item["id"] for node in cluster.status()["nodes"] for item in node["instances"]}


def _replaced(cluster: LabCluster, old: set[str]) -> bool:
    """Return whether an instance runs that is none of these, and none of these runs any more."""
    now = _instances(cluster)
    return bool(now) and not now & old
