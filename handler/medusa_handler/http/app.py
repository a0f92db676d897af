"""The Flask app: everything that is not a probe. Importing this imports Flask (100 to 200 ms)."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING

from flask import Flask, Response, g, jsonify, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from ..faults import ApiError, as_api_error, compact, internal_error
from ..user_code.binding import InvalidBodyError
from ..user_code.user_traceback import user_traceback
from .exposition import exposition
from .invocation import root
from .timing import as_chrome_trace, as_json
from .work import Work

if TYPE_CHECKING:
    from ..service import Service

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(service: Service) -> Flask:
    """All routes of one instance."""
    app = Flask("medusa_handler", static_folder=None, template_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = service.settings.max_body_mb * 1_000_000
    app.json.sort_keys = False  # type: ignore[attr-defined]
    work = Work(service)

    @app.before_request
    def name_request() -> None:
        given = request.headers.get("X-Request-Id", "")
        g.began = time.monotonic()
        g.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    @app.after_request
    def tell_request(response: Response) -> Response:
        response.headers["X-Request-Id"] = g.request_id
        return response

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

    if service.engine is not None:
        from ..openai.routes import blueprint

        app.register_blueprint(blueprint(service, work))
    own = {rule.rule: sorted(rule.methods or ()) for rule in app.url_map.iter_rules()}
    app.register_blueprint(root(service, work))

    @app.before_request
    def keep_own() -> Response | None:
        """A function takes every path but these, whatever the method."""
        methods = own.get(request.path)
        if methods is None or (request.method in methods and request.method != "OPTIONS"):
            return None
        if request.method == "OPTIONS":
            return Response(headers={"Allow": ", ".join(methods)})
        raise MethodNotAllowed(methods)

    app.register_error_handler(Exception, lambda error: _error(service, error))
    return app


def _error(service: Service, error: Exception) -> Response:
    known = as_api_error(error)
    if known is None and isinstance(error, HTTPException):
        known = _http_error(service, error)
    if known is None:
        folder = service.function.folder if service.function is not None else None
        logger.error("request %s failed\n%s", g.request_id, user_traceback(error, folder))
        known = internal_error(g.request_id)
    body = known.body()
    if service.function is not None and not _is_ours(request.path):
        body = {"error": known.message}
        if isinstance(error, InvalidBodyError):
            body["fields"] = error.fields
    return Response(compact(body), known.status, known.headers, content_type="application/json")


def _is_ours(path: str) -> bool:
    return path.startswith("/v1/") or path in ("/tokenize", "/detokenize")


def _http_error(service: Service, error: HTTPException) -> ApiError:
    """werkzeug's own errors, in words that help."""
    status = error.code or 500
    keep = {name: value for name, value in error.get_headers() if name in ("Allow", "Location")}
    if status == 413:
        return ApiError(413, f"the body is larger than {service.settings.max_body_mb} MB", code="body_too_large")
    if status == 404:
        return ApiError(404, f"there is no route {request.method} {request.path}", code="not_found")
    if status == 405:
        allowed = keep.get("Allow", "another method")
        return ApiError(405, f"{request.path} takes {allowed}, not {request.method}", code="bad_method", headers=keep)
    return ApiError(status, error.description or error.name, headers=keep)
