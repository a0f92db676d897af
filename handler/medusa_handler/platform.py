"""What a platform adds to the server. An adapter makes a ``Platform``; this package knows no particular one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .contract import Request

LIVE, ACCEPTING, READY = "live", "accepting", "ready"


class RequestSummary(NamedTuple):
    """A request whose answer is about to be sent."""

    method: str
    headers: Mapping[str, str]  # of the request
    status: int
    elapsed_s: float


@dataclass(frozen=True)
class Route:
    """A route of the platform's own. ``endpoint`` is called with the request and the path's parameters.

    It returns what a function may return. ``metric`` is the route's name in the metrics; its requests are admitted,
    limited, and waited for at the end. It is None for a route that only looks something up.
    """

    method: str
    path: str  # with parameters in angle brackets: /models/<name>
    endpoint: Callable[..., Any]
    metric: str | None = None


@dataclass(frozen=True)
class Platform:
    """A platform's protocol, as a translation around ``POST /``.

    ``probes`` maps paths to LIVE (the process runs), ACCEPTING (until SIGTERM), READY (the function answers), or to a
    path of the function itself, which is called when it is ready. ``translate_request`` and ``translate_result``
    translate requests and the results of calls; a model's own answer is given to ``translate_result`` as a Response.
    """

    name: str = "local"
    probes: Mapping[str, str] = field(default_factory=dict)
    # More fields of a probe's body, by its path and whether its answer is 200.
    probe_fields: Callable[[str, bool], Mapping[str, Any]] | None = None
    aliases: Sequence[str] = ()  # further paths of POST /, whose errors are those of POST /
    prefix: str = ""  # the paths below /v1 are also there below this one, such as /openai/v1/models
    routes: Sequence[Route] = ()
    translate_request: Callable[[Request], Request] | None = None
    translate_result: Callable[[Request, Any], Any] | None = None
    request_id: Callable[[Mapping[str, str]], str | None] | None = None  # a request's id, from its headers
    timeout_s: Callable[[Mapping[str, str]], float | None] | None = None  # a request's own time limit, from its headers
    preflight: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None  # headers of the answer to OPTIONS /
    extra_headers: Callable[[RequestSummary], Mapping[str, str]] | None = None  # headers to add to every answer
    # Called once, when the routes are there, with functions that return the page of /metrics and how many requests are
    # in flight.
    start: Callable[[Callable[[], str], Callable[[], int]], None] | None = None
    stop: Callable[[], None] | None = None  # at SIGTERM
    linger_s: float = 0.0  # how long after SIGTERM requests may still come
    streams: bool = True  # False if the platform only passes on whole answers
    early_heartbeats: bool = True  # whether a stream may begin, with status 200, before the model is there
    openapi_paths: Mapping[str, Any] = field(default_factory=dict)  # further paths of /openapi.json
