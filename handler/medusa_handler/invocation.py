"""POST /: the user's function, or without one a completion by the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flask import Blueprint, Response, g, request

from .body import json_object, read_body
from .contract import Headers, Request
from .faults import ApiError

if TYPE_CHECKING:
    from .service import Service
    from .work import Work

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def root(service: Service, work: Work, aliases: Sequence[str] = ()) -> Blueprint:
    """``aliases`` are further paths of the same, for platforms that have their own."""
    routes = Blueprint("function", __name__)
    function = service.function
    if function is None:

        def infer() -> Response:
            return work.run("/", lambda: _infer(service, work))

        for path in ("/", *aliases):
            routes.add_url_rule(path, view_func=infer, methods=["POST"])
        return routes

    @routes.route("/", methods=_METHODS, provide_automatic_options=False)
    @routes.route("/<path:_path>", methods=_METHODS, provide_automatic_options=False)
    def invoke(_path: str = "") -> Response:
        def answer() -> Response:
            from .answering import respond

            gone = work.gone()
            called = _request()
            service.admission.start(gone, service.settings.hold_s)
            try:
                response = respond(service, function.call(called, gone), called, gone)
            except BaseException:
                service.admission.finish()
                raise
            response.call_on_close(service.admission.finish)
            return response

        return work.run("/", answer)

    return routes


def _request() -> Request:
    return Request(
        method=request.method,
        path=request.path,
        headers=Headers(request.headers.items()),
        query=request.args.to_dict(),
        body=read_body(),
        id=g.request_id,
    )


def _infer(service: Service, work: Work) -> Response:
    """A JSON body as in the OpenAI routes (``messages`` make it a chat); any other body is the prompt."""
    from .openai.routes import complete, converse

    if request.mimetype == "application/json":
        body = json_object()
        return (converse if "messages" in body else complete)(service, body, work.gone())
    prompt = read_body().decode(errors="replace")
    if not prompt.strip():
        raise ApiError(400, 'expected {"prompt": …} as JSON, or the prompt itself as the body', param="prompt")
    if prompt.lstrip().startswith("{"):  # curl -d sends JSON as a form
        return complete(service, _object(prompt), work.gone())
    return complete(service, {"prompt": prompt}, work.gone())


def _object(text: str) -> dict[str, object]:
    import json

    try:
        value = json.loads(text)
    except ValueError:
        return {"prompt": text}
    return value if isinstance(value, dict) else {"prompt": text}
