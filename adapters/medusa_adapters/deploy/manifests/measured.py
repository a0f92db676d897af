"""How long an instance of this function takes to start, read from the timeline of one that has started."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from medusa_runtime.errors import ConfigError
from medusa_runtime.storage.base import redacted
from medusa_runtime.timeline import Stage, moment, ready_at, window

_TIMEOUT_S = 10
_MOST_BYTES = 16_000_000
_NS = 1e9


class MeasuredStart(NamedTuple):
    """A measured start. ``cold_start_s`` ends when the instance was ready, ``ttft_s`` at the first token, if any."""

    cold_start_s: float
    ttft_s: float | None
    source: str

    @property
    def answer_s(self) -> float:
        """The seconds from the start to the first byte of an answer."""
        return max(self.cold_start_s, self.ttft_s or 0.0)


def read_measured_start(source: str) -> MeasuredStart:
    """Return the times of a ``/timeline`` document: a file, or an instance's URL (``/timeline`` is added if missing).

    Raises ConfigError if it cannot be read, is not a timeline, or ends before the instance was ready.
    """
    stages = _stages(_read(source), source)
    ready, token = ready_at(stages), moment(stages, "first_token")
    if ready is None:
        raise ConfigError(
            f"--timeline={redacted(source)!r}: expected the timeline of an instance that became ready, found "
            f"{len(stages)} stages and no 'ready'; ask it again when /readyz answers 200"
        )
    start, end = window(stages)
    # A first token after the window belongs to a request to an idle instance, and says nothing about a start.
    ttft = (token - start) / _NS if token is not None and token <= end else None
    return MeasuredStart((ready - start) / _NS, ttft, redacted(source))


def _read(source: str) -> Any:
    try:
        if source.startswith(("http://", "https://")):
            url = source if source.rstrip("/").endswith("/timeline") else source.rstrip("/") + "/timeline"
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                text = answer.read(_MOST_BYTES)
        else:
            with open(source, "rb") as file:
                text = file.read(_MOST_BYTES)
    except (OSError, ValueError, urllib.error.URLError) as error:
        cause = getattr(error, "reason", error)  # urllib wraps the error of the connection
        reason = getattr(cause, "strerror", None) or cause
        if getattr(error, "code", None) == 401:
            reason = "it asks for a token; save its answer with `curl -H 'Authorization: Bearer …'`, and name the file"
        raise ConfigError(f"--timeline={redacted(source)!r} cannot be read: {reason}") from None
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(
            f"--timeline={redacted(source)!r}: expected the JSON of /timeline, found something else"
        ) from None


def _stages(document: Any, source: str) -> list[Stage]:
    try:
        return [
            Stage(str(s["name"]), str(s["process"]), int(s["start_ns"]), int(s["end_ns"]), s.get("detail") or {})
            for s in document["stages"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        expected = 'an object with "stages", each with name, process, start_ns and end_ns'
        raise ConfigError(f"--timeline={redacted(source)!r}: expected {expected}, as GET /timeline answers") from None
