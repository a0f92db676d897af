"""A node that serves while it forwards weights: how much longer its tokens take, paced and unpaced, and why."""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from medusa_adapters.bench.result import Row
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_runtime.errors import LabError

from benchmarks.cluster.chain import cpu_seconds_of, fetch
from benchmarks.cluster.options import Options
from benchmarks.cluster.weight_nodes import WeightNode, weight_nodes
from benchmarks.result_row import row

_PORT = 8080
_PACE = 0.85  # the share of the link for weights while the node serves
_STREAMS = 2  # requests at the same time
_TOKENS = 150  # of each request; with more of them, the p99 would come from tokens of longer contexts
# Rounds of a run. Each measures a slice of the two ways of the promised ratio; the first one, of all ways.
_ROUNDS = 7
_STOLEN = 0.01  # slices count only if this machine's host took at most this share of the serving core's time
_RESAMPLED = 400
_PROBABLE = (0.05, 0.95)  # the quantiles of the resampled figures between which the true one probably is
_READY_WITHIN_S = 120.0


class _Way(NamedTuple):
    """A case to compare.

    ``sender`` is the node that sends weights while the measured one serves, and ``pace`` the share of the link that
    weights may take (None: all of it). With ``local``, the client is on the serving node, so that tokens do not meet
    weights on the link.
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
_RATIOS = {  # metric → the two ways that it compares
    "tpot_p99_ratio": ("paced", "elsewhere"),
    "tpot_p99_ratio_unpaced": ("unpaced", "elsewhere"),
    "tpot_p99_ratio_unpaced_local": ("unpaced_local", "elsewhere_local"),
    "tpot_p99_ratio_elsewhere": ("elsewhere", "alone"),
}
_PROMISED = "tpot_p99_ratio"


class _Slice(NamedTuple):
    """The measurements of a few seconds of one way."""

    gaps_s: list[float]  # between tokens
    seconds: float
    sent_bytes: int  # by the serving node
    sender_cpu_s: float  # CPU time of the serving node's agent and server of regions
    stolen: float  # the share of the serving core's time that the machine's host took


def _p99_ms(slices: Sequence[_Slice]) -> float:
    gaps = sorted(gap for each in slices for gap in each.gaps_s)
    return gaps[int(len(gaps) * 0.99)] * 1e3


def _p99_of(slices: Sequence[tuple[_Slice, ...]]) -> float:
    """Return the p99 of all tokens of a way in ms or, with two ways, the ratio of their p99 in the same rounds."""
    one, *others = (_p99_ms(way) for way in zip(*slices, strict=True))
    return one / others[0] if others else one


def _undisturbed(slices: Sequence[tuple[_Slice, ...]]) -> list[tuple[_Slice, ...]]:
    """Return the slices in which the machine's host took almost no time, but at least the better half."""
    ordered = sorted(slices, key=lambda each: max(one.stolen for one in each))
    quiet = sum(all(one.stolen <= _STOLEN for one in each) for each in ordered)
    return ordered[: max(quiet, (len(ordered) + 1) // 2)]


def _estimate(metric: str, unit: str, slices: Sequence[tuple[_Slice, ...]]) -> dict[str, Any]:
    """Return a row with the p99, and the range of 90 % of the p99 of samples drawn from the slices (bootstrap)."""
    draw, counted = random.Random(0), _undisturbed(slices)
    drawn = sorted(_p99_of(draw.choices(counted, k=len(counted))) for _ in range(_RESAMPLED))
    least, most = (drawn[int(share * _RESAMPLED)] for share in _PROBABLE)
    return asdict(Row("forwarding", metric, unit, _p99_of(counted), least, most, len(counted)))


def rows(options: Options) -> list[dict[str, Any]]:
    """Measure the p99 of the time between two tokens, as another node sees it.

    The serving node has a core of its own, in place of a machine of its own. The other nodes and the clients share the
    other cores. But cores of one machine still share caches, or are threads of one core. So a node that forwards is
    compared with one that only serves while another node sends the same weights. That one is compared with a node that
    serves while nothing else happens.

    A figure is the p99 of the tokens of all undisturbed slices together. The true one is probably between the row's
    least and greatest values (see ``_estimate``).
    """
    everywhere = os.sched_getaffinity(0)
    own = {min(everywhere)}
    os.sched_setaffinity(0, everywhere - own or everywhere)
    try:
        rounds = _measure(options, own)
    finally:
        os.sched_setaffinity(0, everywhere)
    slices = {name: [each[name] for each in rounds if name in each] for name in _WAYS}
    found = []
    for metric, names in _RATIOS.items():
        both = [tuple(each[name] for name in names) for each in rounds if set(names) <= each.keys()]
        found.append(_estimate(metric, "", both))
    base = slices[_RATIOS[_PROMISED][1]]
    found.append(_estimate("tpot_p99_noise", "", list(zip(base[::2], base[1::2], strict=False))))
    for name in _WAYS:
        found.append(_estimate(f"tpot_p99_{name}_ms", "ms", [(each,) for each in slices[name]]))
    for name in ("paced", "unpaced"):
        shares = [each.sent_bytes / each.seconds / options.link_bytes_per_s for each in slices[name]]
        found.append(row("forwarding", f"link_share_{name}", "", shares))
        cpus = [each.sender_cpu_s / each.seconds for each in slices[name]]
        found.append(row("forwarding", f"sender_cpus_{name}", "", cpus))
    return found


def _measure(options: Options, own: set[int]) -> list[dict[str, _Slice]]:
    """Measure all rounds, and return the slices of each, by their ways."""
    link = LinkSpeed(options.link_bytes_per_s)
    rounds: list[dict[str, _Slice]] = [{} for _ in range(options.runs * _ROUNDS)]
    with (
        Laboratory(4, link, cpus=options.cpus, cores={"n1": own}, origin={"model": options.model}) as lab,
        weight_nodes(lab, tls=options.tls) as (serving, receiving, other, client),
    ):
        url = f"{lab.origin_url}/model"
        for node in (serving, other):
            fetch([node], url)
        _serve(lab, serving.name, url)
        _stream(lab, serving.name, client.name, [])
        senders = {"serving": serving, "other": other, None: None}
        for number, slices in enumerate(rounds):
            names = _RATIOS[_PROMISED] if number % _ROUNDS else _WAYS
            for name in sorted(names, reverse=bool(number % 2)):  # turns, so that a drift affects all ways alike
                way = _WAYS[name]
                serving.ask("pace", bytes_per_s=None if way.pace is None else way.pace * options.link_bytes_per_s)
                sender = senders[way.sender]
                weights = None if sender is None else _Weights(sender, receiving, url)
                slices[name] = _slice(lab, serving.name, serving.name if way.local else client.name)
                if weights is not None:
                    weights.end()
    return rounds


def _slice(lab: Laboratory, node: str, client: str) -> _Slice:
    sent, cpu_s, stolen_s, began = (
        lab.sent_bytes(node),
        _sender_cpu_s(lab, node),
        _stolen_s(lab, node),
        time.monotonic(),
    )
    gaps = _gaps_s(lab, node, client)
    seconds = time.monotonic() - began
    stolen = (_stolen_s(lab, node) - stolen_s) / seconds
    return _Slice(gaps, seconds, lab.sent_bytes(node) - sent, _sender_cpu_s(lab, node) - cpu_s, stolen)


def _stolen_s(lab: Laboratory, node: str) -> float:
    """Return the seconds that this machine's host has taken from the node's cores (steal time in proc_stat(5))."""
    names = {f"cpu{core}" for core in lab.cores[node]}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    return sum(int(fields[8]) for fields in lines if fields[0] in names) / os.sysconf("SC_CLK_TCK")


def _sender_cpu_s(lab: Laboratory, node: str) -> float:
    return sum(cpu_seconds_of(pid) for pid, line in lab.processes(node).items() if "medusa_adapters serve" not in line)


class _Weights:
    """A thread that makes a node fetch a model from another node again and again, until ``end``."""

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
        except BaseException as error:  # noqa: BLE001  raised again in ``end``
            self._error = error

    def end(self) -> None:
        self._ending.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def _serve(lab: Laboratory, node: str, url: str) -> None:
    """Start `medusa serve` in a node, and wait until it is ready. It ends with the laboratory."""
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
    """Request a completion from ``node`` in the network of ``client``; add the seconds between tokens to ``gaps``."""
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
