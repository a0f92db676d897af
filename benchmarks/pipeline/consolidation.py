"""A stream while its group becomes one instance: its tokens, its pause, and its speed afterwards (ParaServe §8.4).

Afterwards another instance, which was never a group, continues the same prompt and tokens on a node of its own. Both
run at the same time, so that whatever slows the machine down slows both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from medusa_runtime.timeline import Stage

from benchmarks.pipeline.options import Options
from benchmarks.pipeline.workers import Site, Stream, Workers, follow
from benchmarks.result_row import row

SIZE = 4
_LINK_BYTES_PER_S = 20e6
_LONG = 4  # a stream is several times as long as the measured part, so that the switch happens in the middle
_POLL_S = 0.1
_PARAMS: tuple[Mapping[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 11})  # greedy and seeded


def rows(options: Options) -> list[dict[str, Any]]:
    wrong: list[float] = []
    pauses: list[float] = []
    pauses_s: list[float] = []
    after: list[float] = []
    count = options.tokens * _LONG
    site = Site(options.over(_LINK_BYTES_PER_S), SIZE + 1)
    with site, Workers(site, [None], [None], first=SIZE) as one:
        size = min(SIZE, len(site.bytes.layers))
        one.clients[0].wait_ready(600)
        alone = [one.stream(prompt=options.prompt_tokens, count=count, **params) for params in _PARAMS]
        for _ in range(options.runs):
            for params, expected in zip(_PARAMS, alone, strict=True):
                with Workers.group(site, size, then="down") as workers:
                    found, beside = _streams(workers, one, options.prompt_tokens, count, params)
                    workers.end()
                    stages = workers.timelines[0]
                wrong.append(_differences(found.tokens, expected.tokens))
                switch = _switch(stages, workers.began)
                if switch is None or switch > found.times[-1]:
                    continue  # the switch came after the stream, so the stream shows nothing of it
                usual = median(expected.gaps())
                pause = _pause(found, switch)
                pauses_s.append(pause)
                pauses.append(max(pause - _last_bytes(stages) / site.link_bytes_per_s, 0.0) / usual)
                ours, others = gaps_together(found, beside)
                if len(ours) > options.tokens // 4:
                    after.append(median(ours) / median(others))
    result = [row("transition", "wrong_tokens", "tokens", wrong)]
    if pauses:
        result.append(row("consolidation", "pause_tokens", "tokens", pauses))
        result.append(row("consolidation", "pause_s", "s", pauses_s))
    if after:
        result.append(row("after", "tpot_ratio", "ratio", after))
    return result


def _streams(
    workers: Workers, one: Workers, prompt: int, count: int, params: Mapping[str, Any]
) -> tuple[Stream, Stream]:
    """Stream a group's answer and, once the group has become one instance, the rest of it from the instance ``one``.

    Return both streams. The second one is empty if the group's stream ended first.
    """
    found = Stream(workers.began)
    stream = workers.begin(prompt=prompt, count=count, **params)
    thread = threading.Thread(target=follow, args=(found, stream), daemon=True)
    thread.start()
    formed = False
    while thread.is_alive():
        whole = workers.stats().get("workers", 1) == 1  # also true before the group has formed
        if formed and whole:
            break
        formed |= not whole
        time.sleep(_POLL_S)
    beside, so_far = Stream(time.monotonic()), tuple(found.tokens)
    if len(so_far) < count:
        follow(beside, one.begin(prompt=prompt, count=count - len(so_far), so_far=so_far, **params))
    thread.join()
    return found, beside


def gaps_together(found: Stream, beside: Stream) -> tuple[list[float], list[float]]:
    """Return the gaps between the tokens of two streams, for the time in which both get tokens.

    ``beside`` has only the last part of the answer. The gaps of both are at the same places in the answer, and so have
    contexts of the same length.
    """
    if not beside.times:
        return [], []
    behind = len(found.times) - len(beside.times)
    begin, end = beside.began + beside.times[0] - found.began, found.began + found.times[-1] - beside.began
    first = sum(at < begin for at in found.times)
    last = behind + sum(at <= end for at in beside.times)
    return found.gaps()[first : last - 1], beside.gaps()[first - behind : last - behind - 1]


def _differences(found: list[int], expected: list[int]) -> int:
    """Return the number of tokens that differ, are missing or are too many."""
    differing = sum(a != b for a, b in zip(found, expected, strict=False))
    return differing + abs(len(found) - len(expected))


def _switch(stages: list[Stage], began: float) -> float | None:
    """Return when the group ended in order, in seconds since ``began``; None if it did not.

    All processes of the machine share one clock.
    """
    return next((stage.start_ns / 1e9 - began for stage in stages if stage.name == "consolidated"), None)


def _pause(stream: Stream, switch: float) -> float:
    """Return the longest gap between two tokens within half a second of the switch, in seconds."""
    near = [
        gap
        for gap, at in zip(stream.gaps(), stream.times, strict=False)
        if at <= switch + 0.5 and at + gap >= switch - 0.5
    ]
    return max(near, default=0.0)


def _last_bytes(stages: list[Stage]) -> float:
    """Return the bytes that were still to be sent while nothing ran: at most one round's share."""
    gather = next((stage for stage in stages if stage.name == "gather"), None)
    return 0.0 if gather is None else gather.detail["last_bytes"]
