"""A stream while its group becomes one instance: its tokens, its pause, and its speed afterwards (ParaServe §8.4)."""

from __future__ import annotations

from statistics import median
from typing import Any

from medusa_runtime.timeline import Stage

from benchmarks.pipeline.options import Options, row
from benchmarks.pipeline.workers import Site, Stream, Workers

SIZE = 4
_LINK_BYTES_PER_S = 20e6
_LONG = 8  # a stream lives several times as long as the measured part, so that the switch is in the middle
SEEDED = {"temperature": 1.0, "seed": 11}


def rows(options: Options) -> list[dict[str, Any]]:
    wrong: list[float] = []
    pauses: list[float] = []
    pauses_s: list[float] = []
    after: list[float] = []
    count = options.tokens * _LONG
    with Site(options.over(_LINK_BYTES_PER_S), SIZE) as site:
        size = min(SIZE, len(site.bytes.layers))
        for _ in range(options.runs):
            with Workers.group(site, 1) as one:
                one.clients[0].wait_ready(600)
                alone = [one.stream(prompt=options.prompt_tokens, count=count, **p) for p in ({}, SEEDED)]
            for params, expected in zip(({}, SEEDED), alone, strict=True):
                with Workers.group(site, size, then="down") as workers:
                    found = workers.stream(prompt=options.prompt_tokens, count=count, began=workers.began, **params)
                    workers.end()
                    stages = workers.stages(0)
                wrong.append(_differences(found.tokens, expected.tokens))
                switch = _switch(stages, workers.began)
                if switch is None or switch > found.times[-1]:
                    continue  # it came after the stream: nothing to see of it
                usual = median(expected.gaps())
                pause = _pause(found, switch)
                pauses_s.append(pause)
                pauses.append(max(pause - _last_bytes(site, stages) / site.link_bytes_per_s, 0.0) / usual)
                later = [gap for gap, at in zip(found.gaps(), found.times, strict=False) if at > switch]
                if len(later) > options.tokens // 4:
                    after.append(median(later) / usual)
    result = [row("transition", "wrong_tokens", "tokens", wrong)]
    if pauses:
        result.append(row("consolidation", "pause_tokens", "tokens", pauses))
        result.append(row("consolidation", "pause_s", "s", pauses_s))
    if after:
        result.append(row("after", "tpot_ratio", "ratio", after))
    return result


def _differences(found: list[int], expected: list[int]) -> int:
    """Tokens that differ, are lost or too many."""
    differing = sum(a != b for a, b in zip(found, expected, strict=False))
    return differing + abs(len(found) - len(expected))


def _switch(stages: list[Stage], began: float) -> float | None:
    """When the group ended in order, in seconds from ``began``; clocks of one machine are one."""
    return next((stage.start_ns / 1e9 - began for stage in stages if stage.name == "consolidated"), None)


def _pause(stream: Stream, switch: float) -> float:
    """The longest gap between two tokens around the switch."""
    near = [
        gap
        for gap, at in zip(stream.gaps(), stream.times, strict=False)
        if at <= switch + 0.5 and at + gap >= switch - 0.5
    ]
    return max(near, default=0.0)


def _last_bytes(site: Site, stages: list[Stage]) -> float:
    """The bytes that had to come while nothing ran: a round's share at most."""
    gather = next((stage for stage in stages if stage.name == "gather"), None)
    return 0.0 if gather is None else gather.detail["last_bytes"]
