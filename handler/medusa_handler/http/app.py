"""The Flask app: everything that is not a probe. Importing this imports Flask (100 to 200 ms)."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - werkzeug encodes each request's host by it, also after a handler's setuid
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from flask import Blueprint, Flask, Response, current_app, g, jsonify, request
from medusa_runtime.json_log import current_request_id
from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.routing import Rule

from ..contract import Headers
from ..faults import ApiError, as_api_error, compact, internal_error, is_of_messages
from ..platform import RequestSummary
from ..user_code.binding import InvalidBodyError
from ..user_code.user_traceback import user_traceback
from . import sse
from .body import current_request
from .exposition import exposition
from .invocation import Infer, function_routes
from .request_runner import RequestRunner
from .timing import as_chrome_trace, as_json

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from ..platform import Platform, Route
    from ..service import Service

logger = logging.getLogger(__name__)

_MODEL = "openai"  # the blueprint of a model's routes
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ModelRoutes(NamedTuple):
    """The routes of a served model. ``infer`` answers ``POST /`` if there is no function."""

    blueprint: Blueprint
    infer: Infer


class _Rule(Rule):
    """A rule that compiles its URL builder at the first use: that takes 0.5 ms, and nothing here builds URLs."""

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        def build(rule: Rule, **values: Any) -> tuple[str, str]:
            compiled = super(_Rule, self)._compile_builder(append_unknown)
            return compiled(rule, **values)

        return build


def create_app(service: Service, model_routes: Callable[[Service, RequestRunner], ModelRoutes] | None = None) -> Flask:
    """Return the app with all routes of one instance. ``model_routes`` makes those of a model that an engine serves."""
    app = Flask("medusa_handler", static_folder=None, template_folder=None)
    app.url_rule_class = _Rule
    # A redirect from // would lead to whatever host, by http, and a function would not see such a path.
    app.url_map.merge_slashes = False
    app.config["MAX_CONTENT_LENGTH"] = service.settings.max_body_bytes
    app.json.sort_keys = False  # type: ignore[attr-defined]
    runner = RequestRunner(service)
    _add_request_ids(app, service.platform)
    _add_report_routes(app, service)
    model = None if model_routes is None else model_routes(service, runner)
    if model is not None:
        app.register_blueprint(model.blueprint)
    own = {rule.rule: sorted(rule.methods or ()) for rule in app.url_map.iter_rules()}
    app.register_blueprint(function_routes(service, runner, None if model is None else model.infer))
    for route in service.platform.routes:
        _add_route(app, service, runner, route)
    preflight = service.platform.preflight

    @app.before_request
    def reject_other_methods() -> Response | None:
        """Answer our own paths for other methods; else the function, which takes every path, would."""
        if request.method == "OPTIONS" and request.path == "/" and preflight is not None:
            return Response(status=204, headers=dict(preflight(Headers(request.headers.items()))))
        methods = own.get(request.path)
        if methods is None or (request.method in methods and request.method != "OPTIONS"):
            return None
        if request.method == "OPTIONS":
            return Response(headers={"Allow": ", ".join(methods)})
        raise MethodNotAllowed(methods)

    app.register_error_handler(Exception, lambda error: _error(service, error))
    if service.platform.start is not None:
        service.platform.start(lambda: exposition(service), lambda: service.admission.in_flight)
    _wrap(app, service.platform.prefix)
    return app


def _wrap(app: Flask, prefix: str) -> None:
    """Close a response whose status or headers the server refuses to send. Take ``prefix`` off paths before /v1."""
    answer = app.wsgi_app

    def handle(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if prefix:
            for name in ("PATH_INFO", "RAW_URI"):
                if environ.get(name, "").startswith(prefix + "/v1/"):
                    environ[name] = environ[name].removeprefix(prefix)
        try:
            return answer(environ, start_response)
        except BaseException:
            RequestRunner.close_unsent(environ)
            raise

    app.wsgi_app = handle  # type: ignore[method-assign]


def _add_request_ids(app: Flask, platform: Platform) -> None:
    """Give each request an id, the client's own where it sends one, and let the platform see each answer."""

    @app.before_request
    def add_request_id() -> None:
        g.began = time.monotonic()
        own = platform.request_id(Headers(request.headers.items())) if platform.request_id is not None else None
        given = request.headers.get("X-Request-Id", "")
        g.request_id = own or (given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex())
        current_request_id.set(g.request_id)

    @app.after_request
    def finish_head(response: Response) -> Response:
        if not platform.streams:
            response.make_sequence()
        if response.mimetype == sse.MIME_TYPE:
            for name, value in sse.HEADERS.items():
                response.headers.setdefault(name, value)
        if platform.extra_headers is not None:
            elapsed_s = time.monotonic() - g.began
            headers = Headers(request.headers.items())
            response.headers.update(
                platform.extra_headers(RequestSummary(request.method, headers, response.status_code, elapsed_s))
            )
        response.headers["X-Request-Id"] = g.request_id
        if is_of_messages(request.path):
            response.headers["Request-Id"] = g.request_id  # Anthropic's name of it
        return response


def _add_report_routes(app: Flask, service: Service) -> None:
    """Add the routes that report on the instance."""

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(exposition(service), content_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/timeline")
    def timeline() -> Response:
        stages = service.timeline.stages()
        return jsonify(as_chrome_trace(stages) if request.args.get("format") == "chrome" else as_json(stages))

    @app.get("/openapi.json")
    def openapi() -> Response:
        from .openapi import describe

        return jsonify(describe(service, service.probes.kinds))


def _add_route(app: Flask, service: Service, runner: RequestRunner, route: Route) -> None:
    def view(**parameters: str) -> Response:
        def answer() -> Response:
            from .function_response import respond

            user_request = current_request()
            return respond(service, route.endpoint(user_request, **parameters), user_request, runner.disconnect_check())

        return answer() if route.metric is None else runner.run(route.metric, answer)

    app.add_url_rule(route.path, f"{route.method} {route.path}", view, methods=[route.method])


def _error(service: Service, error: Exception) -> Response:
    RequestRunner.close_unsent(request.environ)
    known = as_api_error(error)
    if known is None and isinstance(error, HTTPException):
        known = _http_error(service, error)
    if known is None:
        folder = service.function.folder if service.function is not None else None
        logger.error("request %s failed\n%s", g.request_id, user_traceback(error, folder))
        known = internal_error(g.request_id)
    body = known.body_for(request.path)
    is_models = _MODEL in request.blueprints or _is_model_route(service, request.path)
    if service.function is not None and (not is_models or request.path in service.platform.aliases):
        body = {"error": known.message}
        if isinstance(error, InvalidBodyError):
            body["fields"] = error.fields
    response = Response(compact(body), known.status, known.headers, content_type="application/json")
    response.content_length = response.calculate_content_length() or 0  # an HttpError may have another server's
    return response


def _is_model_route(service: Service, path: str) -> bool:
    """Return whether a path is a route of the model. Without a model, only those below /v1/ are reserved."""
    return path.startswith("/v1/") or (
        service.engine is not None
        and path in ("/tokenize", "/detokenize", "/classify", "/pooling", "/score", "/rerank", "/v2/rerank")
    )


def _suggestion(service: Service) -> str:
    """Return a hint at the route that the client probably meant (a base URL may lack /v1), or at the list of routes."""
    from difflib import get_close_matches

    if request.path.startswith("/v1/responses/"):
        return "responses are not stored; POST /v1/responses makes one"
    known = sorted({rule.rule for rule in current_app.url_map.iter_rules() if _is_model_route(service, rule.rule)})
    close = get_close_matches(request.path, known, n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else "GET /openapi.json lists those that there are"


def _http_error(service: Service, error: HTTPException) -> ApiError:
    """Return an error of werkzeug's in words that help."""
    status = error.code or 500
    keep = {name: value for name, value in error.get_headers() if name in ("Allow", "Location")}
    if status == 413:
        return ApiError(
            413, f"the body is larger than {service.settings.max_body_mb} MB (--max-body-mb)", code="body_too_large"
        )
    if status == 404:
        return ApiError(
            404, f"there is no route {request.method} {request.path}; {_suggestion(service)}", code="not_found"
        )
    if status == 405:
        methods = [name for name in keep.get("Allow", "").split(", ") if name not in ("", "HEAD", "OPTIONS")]
        allowed = ", ".join(methods) or "another method"
        return ApiError(405, f"{request.path} takes {allowed}, not {request.method}", code="bad_method", headers=keep)
    return ApiError(status, error.description or error.name, headers=keep)
