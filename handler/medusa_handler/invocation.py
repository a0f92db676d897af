"""POST /: the user's function, or without one a completion by the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response, g, request

from .contract import Request
from .faults import ApiError

if TYPE_CHECKING:
    from .service import Service
    from .work import Work

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def root(service: Service, work: Work) -> Blueprint:
    routes = Blueprint("function", __name__)
    function = service.function
    if function is None:

        @routes.post("/")
        def infer() -> Response:
            return work.run("/", lambda: _infer(service, work))

        return routes

    @routes.route("/", methods=_METHODS, provide_automatic_options=False)
    @routes.route("/<path:_path>", methods=_METHODS, provide_automatic_options=False)
    def invoke(_path: str = "") -> Response:
        def answer() -> Response:
            from .answering import respond

            gone = work.gone()
            called = _request()
            return respond(service, function.call(called, gone), called, gone)

        return work.run("/", answer)

    return routes


def _request() -> Request:
    return Request(
        method=request.method,
        path=request.path,
        headers=request.headers,
        query=request.args,
        body=request.get_data(cache=False),
        id=g.request_id,
    )


def _infer(service: Service, work: Work) -> Response:
    """A JSON body as in the OpenAI routes (``messages`` make it a chat); any other body is the prompt."""
    from .openai.routes import complete, converse, json_body

    if request.mimetype == "application/json":
        body = json_body()
        return (converse if "messages" in body else complete)(service, body, work.gone())
    prompt = request.get_data(as_text=True)
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
