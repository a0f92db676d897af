"""A node that serves while it forwards weights: how much longer its tokens take, with and without a pace."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link import Link
from medusa_runtime.errors import LabError

from benchmarks.cluster.chain import fetch
from benchmarks.cluster.options import Options, row
from benchmarks.cluster.weight_nodes import WeightNode, weight_nodes

_PORT = 8080
_PACE = 0.85  # of the link, for weights while the node serves
_STREAMS = 2  # requests at a time
_TOKENS = 400  # so that eight gaps of a sample are longer than its p99
_READY_WITHIN_S = 120.0


def rows(options: Options) -> list[dict[str, Any]]:
    """Measure p99 of the time between two tokens, as a third node sees it."""
    link = Link(options.link_bytes_per_s)
    samples: dict[str, list[float]] = {"alone": [], "paced": [], "unpaced": []}
    with (
        Laboratory(3, link, cpus=options.cpus, origin={"model": options.model}) as lab,
        weight_nodes(lab) as (serving, receiving, _),
    ):
        url = f"{lab.origin_url}/model"
        fetch([serving], url)
        _serve(lab, serving.name, url)
        _stream(lab, serving.name, lab.nodes[2], [])
        ways = [("alone", None), ("paced", _PACE * options.link_bytes_per_s), ("unpaced", None)]
        for _ in range(options.runs):
            ways.append(ways.pop(0))  # what drifts concerns all of them alike
            for name, pace in ways:
                serving.ask("pace", bytes_per_s=pace)
                weights = None if name == "alone" else _Weights(serving, receiving, url)
                samples[name].append(_p99_ms(lab, serving.name, lab.nodes[2]))
                if weights is not None:
                    weights.end()
    return [
        row("forwarding", "tpot_p99_ratio", "", _ratios(samples["paced"], samples["alone"])),
        row("forwarding", "tpot_p99_ratio_unpaced", "", _ratios(samples["unpaced"], samples["alone"])),
        *(row("forwarding", f"tpot_p99_{name}_ms", "ms", found) for name, found in samples.items()),
    ]


def _ratios(beside: Sequence[float], alone: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(beside, alone, strict=True)]


class _Weights:
    """Has a node fetch a model from another again and again, until ``end``."""

    def __init__(self, source: WeightNode, target: WeightNode, url: str) -> None:
        self._ending = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(source, target, url))
        self._thread.start()

    def _run(self, source: WeightNode, target: WeightNode, url: str) -> None:
        try:
            while not self._ending.is_set():
                fetch([target], url, sources=[source])
                target.ask("drop", url=url)
        except BaseException as error:  # noqa: BLE001  raised again where it is awaited
            self._error = error

    def end(self) -> None:
        self._ending.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def _serve(lab: Laboratory, node: str, url: str) -> None:
    """Start `medusa serve` in a node; it ends with the laboratory."""
    log = lab.node_folder(node) / "serve.log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEDUSA_")}
    command = ["-m", "medusa_adapters", "serve", "--model", url, "--node-socket", "none", "--port", str(_PORT)]
    with open(log, "ab") as output:
        lab.popen(
            node, [sys.executable, *command], stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment
        )
    deadline = time.monotonic() + _READY_WITHIN_S
    while not _is_ready(lab, node):
        if time.monotonic() > deadline:
            raise LabError(f"medusa serve is not ready: {Path(log).read_text()[-500:]}")
        time.sleep(0.2)


def _is_ready(lab: Laboratory, node: str) -> bool:
    connection = http.client.HTTPConnection(lab.address(node), _PORT, timeout=5)
    try:
        with lab.network(node):
            connection.connect()
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _p99_ms(lab: Laboratory, node: str, client: str) -> float:
    gaps: list[float] = []
    threads = [threading.Thread(target=_stream, args=(lab, node, client, gaps)) for _ in range(_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(gaps) < _STREAMS * (_TOKENS - 1):
        raise LabError(f"expected {_STREAMS} streams of {_TOKENS} tokens, found {len(gaps)} gaps between tokens")
    return sorted(gaps)[int(len(gaps) * 0.99)] * 1e3


def _stream(lab: Laboratory, node: str, client: str, gaps: list[float]) -> None:
    """Ask for a completion from the node ``client``, and append the times between its tokens."""
    connection = http.client.HTTPConnection(lab.address(node), _PORT, timeout=60)
    with lab.network(client):
        connection.connect()
    body = {"prompt": "Once", "max_tokens": _TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise LabError(f"medusa serve answers {response.status}: {response.read()[:200]!r}")
    before = None
    while line := response.readline():
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            if before is not None:
                gaps.append(now - before)
            before = now
    connection.close()
