"""What a platform adds to the server. An adapter makes one; nothing else in this package knows any platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flask import Flask

    from .service import Service
    from .user_code.contract import Request

LIVE, ACCEPTING, READY = "live", "accepting", "ready"


@dataclass(frozen=True)
class Platform:
    """A platform's protocol, as a translation around ``POST /``.

    ``probes`` maps paths to LIVE (the process runs), ACCEPTING (until SIGTERM), READY (the function answers), or to a
    path of the function itself, which is asked when it is ready. ``receive`` and ``send`` translate requests and the
    results of calls; ``send`` may be given a Flask response. ``limit_s`` is a request's own time limit.
    """

    name: str = "local"
    probes: Mapping[str, str] = field(default_factory=dict)
    aliases: Sequence[str] = ()  # further paths of POST /
    extend: Callable[[Flask, Service], None] | None = None  # other routes; runs once, in the background
    receive: Callable[[Request], Request] | None = None
    send: Callable[[Request, Any], Any] | None = None
    limit_s: Callable[[Mapping[str, str]], float | None] | None = None
    stop: Callable[[], None] | None = None  # at SIGTERM
    linger_s: float = 0.0  # for how long requests go on coming after SIGTERM
    streams: bool = True  # False: the platform hands answers on as a whole
    early_heartbeats: bool = True  # a stream may begin before the model is there, which settles its status as 200
    paths: Mapping[str, Any] = field(default_factory=dict)  # further paths of /openapi.json
