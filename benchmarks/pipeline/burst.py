"""A burst of requests for which four nodes start, as a group that becomes four instances or as four that load first."""

from __future__ import annotations

import threading
from statistics import mean
from typing import Any

from benchmarks.pipeline.options import Options
from benchmarks.pipeline.workers import Site, Stream, Workers, follow
from benchmarks.result_row import row

SIZE, REQUESTS = 4, 32
_PROMPT, _COUNT = 64, 16
_LINK_BYTES_PER_S = 5e6


def rows(options: Options) -> list[dict[str, Any]]:
    ratios, ours, theirs = [], [], []
    with Site(options.over(_LINK_BYTES_PER_S), SIZE) as site:
        size = min(SIZE, len(site.bytes.layers))
        for _ in range(options.runs):
            with Workers(site, [None] * size, [None] * size) as loading:
                slow = _burst(loading, [number % size for number in range(REQUESTS)])
            with Workers.group(site, size, then="up") as group:
                fast = _burst(group, [0] * REQUESTS)
            theirs.append(slow)
            ours.append(fast)
            ratios.append(slow / fast)
    return [
        row("burst-load-then-serve", "ttft_s", "s", theirs),
        row("burst-scaling-up", "ttft_s", "s", ours),
        row("burst", "ttft_ratio", "ratio", ratios),
    ]


def _burst(workers: Workers, ranks: list[int]) -> float:
    """Send all requests at the start, and return the mean of their times to the first token, in seconds."""
    streams: list[Stream] = []
    threads = []
    for number, rank in enumerate(ranks):
        made = Stream(workers.began)
        source = workers.begin(rank, prompt=_PROMPT, count=_COUNT, number=number)
        streams.append(made)
        threads.append(threading.Thread(target=follow, args=(made, source)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return mean(stream.ttft_s for stream in streams)
