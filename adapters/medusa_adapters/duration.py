"""Durations as Go writes them (package time, ParseDuration): what OpenFaaS' variables and headers hold."""

from __future__ import annotations

import re

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def seconds(text: str) -> float:
    """``30s``, ``1m30s``, ``500ms``; a bare number is seconds, as of-watchdog takes it. Raises ValueError."""
    if re.fullmatch(r"\d+", text):
        return float(text)
    if not text or _PART.sub("", text):
        raise ValueError("a duration such as 30s, 1m30s or 500ms")
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
