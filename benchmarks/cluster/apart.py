"""Answers that are written while long prompts come: on two instances that do all, and with prefill and decode apart."""

from __future__ import annotations

import http.client
import json
import threading
import time
from contextlib import closing
from itertools import pairwise
from typing import Any

from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import SWITCH, Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_runtime.container_limits import cpu_count
from medusa_runtime.errors import LabError

from benchmarks.cluster.asking import ask
from benchmarks.cluster.options import Options
from benchmarks.result_row import row
from benchmarks.waiting import until

_NAME, _PORT = "model", 8080
_CORES = 0.4  # the default share of the machine for a node; the rest is for the gateway and the clients
_WRITERS = 2
_ANSWER_TOKENS = 96
_PROMPT_TOKENS = 512
_EVERY_S = 3.0  # a long prompt comes
_SECONDS = 30.0
_WITHIN_S = 180.0


def rows(options: Options) -> list[dict[str, Any]]:
    """Measure the time from token to token of answers, and to the first token after long prompts, in turn."""
    gaps: dict[bool, list[float]] = {True: [], False: []}
    prompts: dict[bool, list[float]] = {True: [], False: []}
    for run in range(options.runs):
        for apart in (True, False) if run % 2 else (False, True):
            gap_s, prompt_s = _measure(options, apart=apart)
            gaps[apart].append(gap_s * 1e3)
            prompts[apart].append(prompt_s)
    ratios = [together / apart for together, apart in zip(gaps[False], gaps[True], strict=True)]
    return [
        row("together", "gap_p99_ms", "ms", gaps[False]),
        row("apart", "gap_p99_ms", "ms", gaps[True]),
        row("together", "long_prompt_s", "s", prompts[False]),
        row("apart", "long_prompt_s", "s", prompts[True]),
        row("apart", "gap_p99_ratio", "ratio", ratios),
    ]


def _measure(options: Options, *, apart: bool) -> tuple[float, float]:
    """Return the p99 of the seconds between two tokens, and the median of those to the answer of a long prompt."""
    cpus = options.cpus or _CORES * cpu_count()
    with Laboratory(2, LinkSpeed(options.link_bytes_per_s), cpus=cpus, origin={_NAME: options.model}) as lab:
        cluster = LabCluster(lab)
        cluster.start()
        instances = 1 if apart else 2
        settings = {"max_concurrency": "8", "threads": "1"}
        cluster.deploy(_NAME, min=instances, max=instances, disaggregated=apart, settings=settings)
        cluster.start_gateway(_PORT)
        until(lambda: _answers(cluster), _WITHIN_S, "a first answer")
        until(lambda: cluster.status()["models"][0]["instances"] == 2, _WITHIN_S, "two instances")
        for number in range(2):  # both have computed a prompt
            _long_prompt(cluster, number)
        ending = threading.Event()
        gaps: list[float] = []
        writers = [threading.Thread(target=_write, args=(cluster, place, ending, gaps)) for place in range(_WRITERS)]
        for one in writers:
            one.start()
        try:
            took = []
            end = time.monotonic() + _SECONDS
            while (began := time.monotonic()) < end:
                _long_prompt(cluster, len(took) + 2)
                took.append(time.monotonic() - began)
                time.sleep(max(_EVERY_S - took[-1], 0.0))
        finally:
            ending.set()
            for one in writers:
                one.join()
            cluster.stop()
    return sorted(gaps)[int(len(gaps) * 0.99)], sorted(took)[len(took) // 2]


def _write(cluster: LabCluster, place: int, ending: threading.Event, gaps: list[float]) -> None:
    """Have answers written, one after the other, and note the seconds between their tokens."""
    while not ending.is_set():
        times = _stream(cluster, place)
        gaps += [after - before for before, after in pairwise(times)]


def _stream(cluster: LabCluster, place: int) -> list[float]:
    """Return when each token of an answer came. Raises LabError for an answer that is an error."""
    body = {
        "model": _NAME, "prompt": [3 + place, 5, 7, 11], "max_tokens": _ANSWER_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    times = []
    with closing(http.client.HTTPConnection(cluster.lab.address(SWITCH), _PORT, timeout=_WITHIN_S)) as connection:
        with cluster.lab.network(SWITCH):
            connection.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    if response.status != 200 or len(times) < _ANSWER_TOKENS // 2:
        raise LabError(f"expected an answer of {_ANSWER_TOKENS} tokens, found status {response.status}, {len(times)}")
    return times


def _answers(cluster: LabCluster) -> bool:
    try:
        _long_prompt(cluster, 0)
    except LabError:  # the gateway does not know the model yet
        return False
    return True


def _long_prompt(cluster: LabCluster, number: int) -> None:
    prompt = [3 + (7 * number + 11 * place) % 900 for place in range(_PROMPT_TOKENS)]
    ask(cluster, _PORT, {"model": _NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0})
