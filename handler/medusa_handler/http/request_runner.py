"""Runs requests: each is admitted and counted, and ends when its client leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from flask import Response, g, request

from ..deadline import Deadline
from ..disconnection import disconnect_check
from ..faults import ClientDisconnectedError, as_api_error, as_exception
from ..forked_child import ending_forked_children
from .body import read_body
from .environ import UNSENT_RESPONSE
from .timing import server_timing

if TYPE_CHECKING:
    from ..service import Service

_CLIENT_CLOSED = 499  # nginx's status for a client that left; only metrics see it


class RequestRunner:
    """Runs requests that do work, unlike probes and reports: admits, counts, and ends them if their client leaves."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def disconnect_check(self) -> Callable[[], bool]:
        """Return a function that returns whether the client has left, and raises ApiError 504 when time is over."""
        left = disconnect_check(request.environ)
        timeout_s = self._service.request_timeout_s(dict(request.headers))
        return left if timeout_s is None else Deadline(timeout_s, g.began, left)

    def run(self, route: str, answer: Callable[[], Response]) -> Response:
        """Admit a request, and return what ``answer`` does. It stays admitted until its last byte has been written.

        ``route`` is its name in the metrics. Raises OverloadedError if too many requests are in flight.
        """
        service = self._service
        began = time.monotonic()
        try:
            # A request takes a place only when its body has come, so a slow body takes none. A request that would be
            # refused anyway is refused before its body is read.
            service.admission.check(service.ready, service.model.eta_s)
            read_body()
            service.admission.enter(service.ready, service.model.eta_s)
        except Exception as error:
            self._count(route, error)
            raise
        try:
            with ending_forked_children():
                response = answer()
        except ClientDisconnectedError:
            service.admission.leave()
            service.metrics.count_request(route, _CLIENT_CLOSED)
            return Response(status=_CLIENT_CLOSED)
        except BaseException as error:
            service.admission.leave()
            self._count(route, error)
            if isinstance(error, Exception):
                raise
            raise as_exception(error) from error
        service.metrics.count_request(route, response.status_code)
        if response.status_code < 400 and service.claim_first_answer():
            response.headers["Server-Timing"] = server_timing(
                service.timeline.stages(), internals=service.settings.server_timing == "stages"
            )

        def close() -> None:
            service.metrics.e2e.observe(time.monotonic() - began)
            service.admission.leave()

        response.call_on_close(close)
        request.environ[UNSENT_RESPONSE] = response
        return response

    @staticmethod
    def close_unsent(environ: MutableMapping[str, Any]) -> None:
        """Close a response that cannot be sent, so that its request gives its places back."""
        response: Response | None = environ.pop(UNSENT_RESPONSE, None)
        if response is not None:
            response.close()

    def _count(self, route: str, error: BaseException) -> None:
        known = as_api_error(error) if isinstance(error, Exception) else None
        status = getattr(error, "code", None) if known is None else known.status
        self._service.metrics.count_request(route, status if isinstance(status, int) else 500)
