"""The timeline of a cold start, for HTTP: a header, JSON, and Chrome's trace format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from medusa_runtime.timeline import Stage, window

_MOST_STAGES = 40  # keeps the header under the 8 KiB that proxies allow


def server_timing(stages: Sequence[Stage], *, internals: bool) -> str:
    """Return the Server-Timing header (W3C Server Timing): how long the start took (``timeline.window``).

    With ``internals`` it has the duration of each stage, too; stages of the same name and process are summed up.
    """
    began_ns, ended_ns = window(stages) if stages else (0, 0)
    whole = f"cold_start;dur={(ended_ns - began_ns) / 1e6:.1f}"
    if not internals:
        return whole
    total_ms: dict[tuple[str, str], float] = {}
    for stage in stages:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", stage.name)
        key = (name, re.sub(r"[^A-Za-z0-9_. -]", "_", stage.process))
        total_ms[key] = total_ms.get(key, 0.0) + (stage.end_ns - stage.start_ns) / 1e6
    entries = list(total_ms.items())[:_MOST_STAGES]
    return ", ".join([whole, *(f'{name};desc="{process}";dur={ms:.1f}' for (name, process), ms in entries)])


def as_json(stages: Sequence[Stage]) -> dict[str, Any]:
    """Return the stages with times in milliseconds since the first one began, and in nanoseconds on CLOCK_MONOTONIC."""
    origin = stages[0].start_ns if stages else 0
    return {
        "clock": "CLOCK_MONOTONIC",
        "origin_ns": origin,
        "stages": [
            {
                **stage._asdict(),
                "start_ms": (stage.start_ns - origin) / 1e6,
                "duration_ms": (stage.end_ns - stage.start_ns) / 1e6,
            }
            for stage in stages
        ],
    }


def as_chrome_trace(stages: Sequence[Stage]) -> dict[str, Any]:
    """Return the stages in Chrome's trace event format, for chrome://tracing and Perfetto, in microseconds."""
    origin = stages[0].start_ns if stages else 0
    rows = {process: number for number, process in enumerate(dict.fromkeys(stage.process for stage in stages))}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": row, "tid": 0, "args": {"name": process}}
        for process, row in rows.items()
    ]
    for stage in stages:
        moment = stage.start_ns == stage.end_ns
        event = {
            "name": stage.name,
            "ph": "i" if moment else "X",
            "ts": (stage.start_ns - origin) / 1e3,
            "pid": rows[stage.process],
            "tid": 0,
            "args": stage.detail,
        }
        events.append(event | ({"s": "g"} if moment else {"dur": (stage.end_ns - stage.start_ns) / 1e3}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}
