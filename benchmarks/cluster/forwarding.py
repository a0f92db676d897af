"""A node that serves while it forwards weights: how much longer its tokens take, with and without a pace, and why."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link import Link
from medusa_runtime.errors import LabError

from benchmarks.cluster.chain import cpu_seconds_of, fetch
from benchmarks.cluster.options import Options, row
from benchmarks.cluster.weight_nodes import WeightNode, weight_nodes

_PORT = 8080
_PACE = 0.85  # of the link, for weights while the node serves
_STREAMS = 2  # requests at a time
_TOKENS = 400  # of a request, in each slice
_SLICES = 2  # of a sample, in turns with those of the other ways: 16 gaps of it are longer than its p99
_READY_WITHIN_S = 120.0


class _Way(NamedTuple):
    """A case to compare: which node sends weights while the measured one serves, and the share of the link it may take.

    ``local``: the client is on the serving node, so that its tokens do not meet weights on the link.
    """

    sender: Literal["serving", "other"] | None
    pace: float | None = None
    local: bool = False


_WAYS = {
    "alone": _Way(None),
    "elsewhere": _Way("other"),
    "paced": _Way("serving", _PACE),
    "unpaced": _Way("serving"),
    "elsewhere_local": _Way("other", local=True),
    "unpaced_local": _Way("serving", local=True),
}
_RATIOS = {  # metric → two ways
    "tpot_p99_ratio": ("paced", "elsewhere"),
    "tpot_p99_ratio_unpaced": ("unpaced", "elsewhere"),
    "tpot_p99_ratio_unpaced_local": ("unpaced_local", "elsewhere_local"),
    "tpot_p99_ratio_elsewhere": ("elsewhere", "alone"),
}
_BASE = "elsewhere"


class _Slice(NamedTuple):
    """Some seconds of one way."""

    gaps_s: list[float]  # between tokens
    seconds: float
    sent_bytes: int  # by the serving node
    sender_cpu_s: float  # of its server of regions and its agent


class _Sample(NamedTuple):
    """The slices of one way in one run."""

    slices: list[_Slice]

    @property
    def p99_ms(self) -> float:
        return _p99_ms(self.slices)

    @property
    def noise(self) -> float:
        """The p99 of every second slice over that of the others, which differ in nothing."""
        one, other = _p99_ms(self.slices[::2]), _p99_ms(self.slices[1::2])
        return max(one, other) / min(one, other)

    @property
    def sent_bytes_per_s(self) -> float:
        return sum(each.sent_bytes for each in self.slices) / self._seconds

    @property
    def sender_cpus(self) -> float:
        return sum(each.sender_cpu_s for each in self.slices) / self._seconds

    @property
    def _seconds(self) -> float:
        return sum(each.seconds for each in self.slices)


def _p99_ms(slices: list[_Slice]) -> float:
    gaps = sorted(gap for each in slices for gap in each.gaps_s)
    return gaps[int(len(gaps) * 0.99)] * 1e3


def rows(options: Options) -> list[dict[str, Any]]:
    """Measure p99 of the time between two tokens, as another node sees it.

    The serving node has a core of its own, as it would have a machine; the other nodes and the clients have the rest.
    Cores of one machine still share caches, or are threads of one core. So a node that forwards is compared with one
    beside which another node sends the same weights, and that one with a node beside which nothing happens.
    """
    everywhere = os.sched_getaffinity(0)
    own = {min(everywhere)}
    os.sched_setaffinity(0, everywhere - own or everywhere)
    try:
        samples = _measure(options, own)
    finally:
        os.sched_setaffinity(0, everywhere)
    found = []
    for metric, names in _RATIOS.items():
        pairs = zip(*(samples[name] for name in names), strict=True)
        found.append(row("forwarding", metric, "", [one.p99_ms / other.p99_ms for one, other in pairs]))
    found.append(row("forwarding", "tpot_p99_noise", "", [sample.noise for sample in samples[_BASE]]))
    for name in _WAYS:
        found.append(row("forwarding", f"tpot_p99_{name}_ms", "ms", [sample.p99_ms for sample in samples[name]]))
    for name in ("paced", "unpaced"):
        shares = [sample.sent_bytes_per_s / options.link_bytes_per_s for sample in samples[name]]
        found.append(row("forwarding", f"link_share_{name}", "", shares))
        found.append(row("forwarding", f"sender_cpus_{name}", "", [sample.sender_cpus for sample in samples[name]]))
    return found


def _measure(options: Options, own: set[int]) -> dict[str, list[_Sample]]:
    link = Link(options.link_bytes_per_s)
    samples: dict[str, list[_Sample]] = {name: [] for name in _WAYS}
    with (
        Laboratory(4, link, cpus=options.cpus, cores={"n1": own}, origin={"model": options.model}) as lab,
        weight_nodes(lab) as (serving, receiving, other, client),
    ):
        url = f"{lab.origin_url}/model"
        for node in (serving, other):
            fetch([node], url)
        _serve(lab, serving.name, url)
        _stream(lab, serving.name, client.name, [])
        ways = list(_WAYS.items())
        for _ in range(options.runs):
            for name in _WAYS:
                samples[name].append(_Sample([]))
            for _ in range(_SLICES):
                ways.reverse()  # what drifts concerns all of them alike
                for name, way in ways:
                    serving.ask("pace", bytes_per_s=None if way.pace is None else way.pace * options.link_bytes_per_s)
                    sender = {"serving": serving, "other": other, None: None}[way.sender]
                    weights = None if sender is None else _Weights(sender, receiving, url)
                    found = _slice(lab, serving.name, serving.name if way.local else client.name)
                    samples[name][-1].slices.append(found)
                    if weights is not None:
                        weights.end()
    return samples


def _slice(lab: Laboratory, node: str, client: str) -> _Slice:
    sent, cpu_s, began = lab.sent_bytes(node), _sender_cpu_s(lab, node), time.monotonic()
    gaps = _gaps_s(lab, node, client)
    seconds = time.monotonic() - began
    return _Slice(gaps, seconds, lab.sent_bytes(node) - sent, _sender_cpu_s(lab, node) - cpu_s)


def _sender_cpu_s(lab: Laboratory, node: str) -> float:
    return sum(cpu_seconds_of(pid) for pid, line in lab.processes(node).items() if "medusa_adapters serve" not in line)


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


def _gaps_s(lab: Laboratory, node: str, client: str) -> list[float]:
    gaps: list[float] = []
    threads = [threading.Thread(target=_stream, args=(lab, node, client, gaps)) for _ in range(_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(gaps) < _STREAMS * (_TOKENS - 1):
        raise LabError(f"expected {_STREAMS} streams of {_TOKENS} tokens, found {len(gaps)} gaps between tokens")
    return gaps


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
