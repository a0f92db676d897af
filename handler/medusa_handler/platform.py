"""What a platform adds to the server. An adapter makes one; nothing else in this package knows any platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .contract import Request

LIVE, ACCEPTING, READY = "live", "accepting", "ready"


class Answered(NamedTuple):
    """A request whose answer is about to be sent."""

    method: str
    headers: Mapping[str, str]  # of the request
    status: int
    elapsed_s: float


@dataclass(frozen=True)
class Route:
    """A route of the platform's own. ``answer`` is called with the request and the path's parameters.

    It returns what a function may return. ``work`` is the route's name in the metrics, and makes it count as work:
    admitted, limited, and waited for at the end; None for a route that only looks something up.
    """

    method: str
    path: str  # with parameters in angle brackets: /models/<name>
    answer: Callable[..., Any]
    work: str | None = None


@dataclass(frozen=True)
class Platform:
    """A platform's protocol, as a translation around ``POST /``.

    ``probes`` maps paths to LIVE (the process runs), ACCEPTING (until SIGTERM), READY (the function answers), or to a
    path of the function itself, which is asked when it is ready. ``receive`` and ``send`` translate requests and the
    results of calls; a model's own answer is given to ``send`` as a Response.
    """

    name: str = "local"
    probes: Mapping[str, str] = field(default_factory=dict)
    aliases: Sequence[str] = ()  # further paths of POST /
    routes: Sequence[Route] = ()
    receive: Callable[[Request], Request] | None = None
    send: Callable[[Request, Any], Any] | None = None
    request_id: Callable[[Mapping[str, str]], str | None] | None = None  # a request's id, from its headers
    limit_s: Callable[[Mapping[str, str]], float | None] | None = None  # a request's own time limit, from its headers
    preflight: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None  # headers of the answer to OPTIONS /
    answered: Callable[[Answered], Mapping[str, str]] | None = None  # headers to add to every answer
    # Runs once, when the routes are there. Given what returns the page of /metrics, and the requests in flight.
    start: Callable[[Callable[[], str], Callable[[], int]], None] | None = None
    stop: Callable[[], None] | None = None  # at SIGTERM
    linger_s: float = 0.0  # for how long requests go on coming after SIGTERM
    streams: bool = True  # False: the platform hands answers on as a whole
    early_heartbeats: bool = True  # a stream may begin before the model is there, which settles its status as 200
    paths: Mapping[str, Any] = field(default_factory=dict)  # further paths of /openapi.json
