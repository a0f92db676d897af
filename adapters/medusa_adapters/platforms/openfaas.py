"""OpenFaaS: the contract of of-watchdog, natively (github.com/openfaas/of-watchdog, README and main.go)."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_runtime.errors import ConfigError

from .base import request_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from medusa_handler.platform import Platform, RequestSummary
    from medusa_runtime.config import Settings

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 30.0
_METRICS_PORT = 8081
_ID_HEADER = "X-Call-Id"
_COUNT = re.compile("[0-9]{1,9}")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_MOST_S = 2**63 / 1e9  # Go counts nanoseconds in 64 bits


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    meant: dict[str, str] = {}
    for theirs, ours in (("read_timeout", "MEDUSA_READ_TIMEOUT"), ("write_timeout", "MEDUSA_WRITE_TIMEOUT")):
        if given := _seconds(environ, theirs):
            meant[ours] = f"{given:g}"
    # Go's server closes the connection after write_timeout, even if exec_timeout is longer.
    limits = [limit for name in ("exec_timeout", "write_timeout") if (limit := _seconds(environ, name))]
    if limits:
        meant["MEDUSA_TIMEOUT"] = f"{min(limits):g}"
    if inflight := _count(environ, "max_inflight", 0):
        meant |= {"MEDUSA_MAX_CONCURRENCY": str(inflight), "MEDUSA_MAX_WAITING": "0"}
    if environ.get("port"):
        meant["PORT"] = environ["port"]
    rest_s = min(limits, default=_WRITE_TIMEOUT_S)
    meant["MEDUSA_DRAIN"] = f"{_linger_s(environ) + rest_s:g}"
    return meant


def platform(settings: Settings, environ: Mapping[str, str]) -> Platform:
    from medusa_handler.platform import ACCEPTING, READY, Platform

    from .metrics_server import CallMetrics, serve

    lock = None if environ.get("suppress_lock", "").lower() in ("true", "1") else Path("/tmp/.lock")
    metrics_port = _count(environ, "metrics_port", _METRICS_PORT)

    calls = CallMetrics()

    def start(page: Callable[[], str], in_flight: Callable[[], int]) -> None:
        serve(lambda: page() + calls.page(in_flight()), settings.host, metrics_port)
        if lock is not None:
            _touch(lock)

    def extra_headers(call: RequestSummary) -> dict[str, str]:
        calls.count(call.method, call.status, call.elapsed_s)
        call_id = request_id(call.headers, _ID_HEADER)
        return {"X-Duration-Seconds": f"{call.elapsed_s:f}"} | ({_ID_HEADER: call_id} if call_id else {})

    return Platform(
        name="openfaas",
        probes={"/_/health": ACCEPTING, "/_/ready": environ.get("ready_path") or READY},
        request_id=partial(request_id, name=_ID_HEADER),
        extra_headers=extra_headers,
        start=start,
        timeout_s=_timeout_s,
        stop=None if lock is None else lambda: lock.unlink(missing_ok=True),
        linger_s=_linger_s(environ),
    )


def _timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of X-Timeout, which can only shorten exec_timeout. Like of-watchdog, ignore an invalid one."""
    try:
        return parse_duration(headers.get("X-Timeout", "")) or None
    except ValueError:
        return None


def _touch(lock: Path) -> None:
    with contextlib.suppress(FileExistsError):
        lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Any user may have put a link or a pipe there.
        os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644))
    except OSError as error:
        logger.warning("cannot write %s (%s); suppress_lock=true spares it", lock, error.strerror)


def _linger_s(environ: Mapping[str, str]) -> float:
    for name in ("healthcheck_interval", "write_timeout"):
        if given := _seconds(environ, name):
            return given
    return _WRITE_TIMEOUT_S


def _seconds(environ: Mapping[str, str], name: str) -> float:
    try:
        return parse_duration(environ.get(name) or "0")
    except ValueError as error:
        raise ConfigError(f"{name}={environ[name]!r} cannot be used: expected {error}") from None


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not _COUNT.fullmatch(text):
        raise ConfigError(f"{name}={text!r} cannot be used: expected a whole number, 0 or more")
    return int(text)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration as Go writes it, such as ``1m30s`` (package time, ParseDuration).

    As in of-watchdog, a bare number is seconds. Raises ValueError.
    """
    text = text.removeprefix("+")
    parts = [(text, "s")] if re.fullmatch("[0-9]+", text) else _PART.findall(text)
    found = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if not parts or (_PART.sub("", text) and parts != [(text, "s")]) or found >= _MOST_S:
        raise ValueError("a duration such as 30s, 1m30s or 500ms")
    return found
