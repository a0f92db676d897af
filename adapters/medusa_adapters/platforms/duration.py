"""Durations as Go writes them (package time, ParseDuration), which OpenFaaS' variables and headers contain."""

from __future__ import annotations

import re

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_MOST_S = 2**63 / 1e9  # Go counts nanoseconds in 64 bits


def parse_duration(text: str) -> float:
    """Return the seconds of ``30s``, ``1m30s`` or ``500ms``. As in of-watchdog, a bare number is seconds.

    Raises ValueError.
    """
    text = text.removeprefix("+")
    parts = [(text, "s")] if re.fullmatch("[0-9]+", text) else _PART.findall(text)
    found = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if not parts or (_PART.sub("", text) and parts != [(text, "s")]) or found >= _MOST_S:
        raise ValueError("a duration such as 30s, 1m30s or 500ms")
    return found
