"""POST /: the user's function or, without one, the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, request

from ..contract import Request
from ..contract import Response as UserResponse
from ..faults import ApiError
from .body import current_request, refuse_encoded, refuse_pages_unasked
from .environ import ARRIVAL, CALLER

if TYPE_CHECKING:
    from ..service import Service
    from ..user_code.function import UserFunction
    from .request_runner import RequestRunner

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


Infer = Callable[["Service", Request, Callable[[], bool]], Response]
"""Answers a request with the model. Raises what the OpenAI routes raise."""


def function_routes(service: Service, runner: RequestRunner, infer: Infer | None) -> Blueprint:
    """Return the routes of the function: every path that is not the server's own.

    Without a function, they are ``POST /`` and its aliases, which ``infer`` answers.
    """
    routes = Blueprint("function", __name__)
    if service.function is not None:
        _add_function(routes, service, service.function, runner)
    elif infer is not None:
        _add_model(routes, service, infer, runner)
    return routes  # an instance that hosts models by request has neither, and so no routes here


def _add_model(routes: Blueprint, service: Service, infer: Infer, runner: RequestRunner) -> None:
    platform = service.platform

    def view() -> Response:
        def answer() -> Response:
            refuse_pages_unasked(service.settings.cors_origins)
            refuse_encoded()
            user_request, is_disconnected = _request(service), runner.disconnect_check()
            response = infer(service, user_request, is_disconnected)
            if platform.translate_result is None or response.is_streamed:
                return response
            from .function_response import respond

            content = response.get_data(), response.status_code, dict(response.headers), response.content_type
            return respond(
                service, platform.translate_result(user_request, UserResponse(*content)), user_request, is_disconnected
            )

        return runner.run("/", answer)

    for path in ("/", *platform.aliases):
        routes.add_url_rule(path, view_func=view, methods=["POST"])


def _add_function(routes: Blueprint, service: Service, function: UserFunction, runner: RequestRunner) -> None:
    platform, send = service.platform, service.platform.translate_result

    @routes.route("/", methods=_METHODS, provide_automatic_options=False)
    @routes.route("/<path:_path>", methods=_METHODS, provide_automatic_options=False)
    def invoke(_path: str = "") -> Response:
        def answer() -> Response:
            from .function_response import respond

            is_disconnected = runner.disconnect_check()
            user_request = _request(service)
            if (
                not service.ready
                and platform.streams
                and platform.early_heartbeats
                and _accepts_only_events(user_request)
            ):
                return _early_stream(service, function, user_request, is_disconnected)
            arrived = request.environ.get(ARRIVAL, 0)
            service.admission.start(is_disconnected, service.settings.hold_s, service.draining, arrived=arrived)
            try:
                result = function.call(user_request, is_disconnected, request.environ.get(CALLER))
                response = respond(
                    service, result if send is None else send(user_request, result), user_request, is_disconnected
                )
            except BaseException:
                service.admission.finish()
                raise
            response.call_on_close(service.admission.finish)
            return response

        return runner.run("/", answer)

    for path in platform.aliases:  # else other routes, such as /v1/models/NAME, might take them
        routes.add_url_rule(path, view_func=invoke, methods=["POST"])


def _accepts_only_events(user_request: Request) -> bool:
    kinds = {each.partition(";")[0].strip().lower() for each in user_request.headers.get("accept", "").split(",")}
    return kinds == {"text/event-stream"}


def _early_stream(
    service: Service, function: UserFunction, user_request: Request, is_disconnected: Callable[[], bool]
) -> Response:
    """Return an event stream that begins before the function is loaded.

    Heartbeats come first, then the events of the result, or the result as one event. The status has already been sent
    as 200, so an error is an event, too.
    """
    from .function_response import Events, respond

    arrived, caller = request.environ.get(ARRIVAL, 0), request.environ.get(CALLER)

    def events() -> Iterator[Any]:
        service.admission.start(is_disconnected, service.settings.hold_s, service.draining, arrived=arrived)
        try:
            result, send = function.call(user_request, is_disconnected, caller), service.platform.translate_result
            if isinstance(result := result if send is None else send(user_request, result), Iterator):
                yield from result
                return
            response = respond(service, result, user_request, is_disconnected)
            text = response.get_data(as_text=True).removesuffix("\n")
            if response.status_code >= 400:
                raise ApiError(response.status_code, text)
            if text:
                yield text
        finally:
            service.admission.finish()

    return Events(service, events(), user_request, is_disconnected).response(200)


def _request(service: Service) -> Request:
    """Return the request as the function sees it, translated by the platform if it translates requests."""
    translate = service.platform.translate_request
    return current_request() if translate is None else translate(current_request())
