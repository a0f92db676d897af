"""POST /: the user's function, or without one a completion by the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, g, request

from ..faults import ApiError
from ..server.wsgi_gateway import ARRIVED
from ..user_code.contract import Headers, Request
from .body import as_json_object, read_body

if TYPE_CHECKING:
    from ..service import Service
    from ..user_code.function import UserFunction
    from .work import Work

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def root(service: Service, work: Work) -> Blueprint:
    platform = service.platform
    routes = Blueprint("function", __name__)
    function, send = service.function, platform.send
    if function is None and service.engine is None:
        return routes  # a host of models that come by request
    if function is None:

        def infer() -> Response:
            def answer() -> Response:
                called = _request(service)
                gone = work.gone()
                response = _infer(service, called, gone)
                if send is None:
                    return response
                from .answering import respond

                return respond(service, send(called, response), called, gone)

            return work.run("/", answer)

        for path in ("/", *platform.aliases):
            routes.add_url_rule(path, view_func=infer, methods=["POST"])
        return routes

    @routes.route("/", methods=_METHODS, provide_automatic_options=False)
    @routes.route("/<path:_path>", methods=_METHODS, provide_automatic_options=False)
    def invoke(_path: str = "") -> Response:
        def answer() -> Response:
            from .answering import respond

            gone = work.gone()
            called = _request(service)
            if not service.ready and platform.streams and platform.early_heartbeats and _takes_only_events(called):
                return _held(service, function, called, gone)
            arrived = request.environ.get(ARRIVED, 0)
            service.admission.start(gone, service.settings.hold_s, service.draining, arrived=arrived)
            try:
                result = function.call(called, gone)
                response = respond(service, result if send is None else send(called, result), called, gone)
            except BaseException:
                service.admission.finish()
                raise
            response.call_on_close(service.admission.finish)
            return response

        return work.run("/", answer)

    return routes


def _takes_only_events(called: Request) -> bool:
    kinds = {each.partition(";")[0].strip().lower() for each in called.headers.get("accept", "").split(",")}
    return kinds == {"text/event-stream"}


def _held(service: Service, function: UserFunction, called: Request, gone: Callable[[], bool]) -> Response:
    """An event stream that begins before the function is loaded: heartbeats, then the result's events or itself as one.

    Its status is 200 already, so an error is an event, too.
    """
    from .answering import Events, respond

    arrived = request.environ.get(ARRIVED, 0)

    def events() -> Iterator[Any]:
        service.admission.start(gone, service.settings.hold_s, service.draining, arrived=arrived)
        try:
            result, send = function.call(called, gone), service.platform.send
            if isinstance(result := result if send is None else send(called, result), Iterator):
                yield from result
                return
            response = respond(service, result, called, gone)
            text = response.get_data(as_text=True).removesuffix("\n")
            if response.status_code >= 400:
                raise ApiError(response.status_code, text)
            if text:
                yield text
        finally:
            service.admission.finish()

    return Events(service, events(), called, gone).response(200)


def _request(service: Service) -> Request:
    """The request as the function sees it, whatever the platform made of it."""
    received = Request(
        method=request.method,
        path=request.path,
        headers=Headers(request.headers.items()),
        query=request.args.to_dict(),
        body=read_body(),
        id=g.request_id,
    )
    translate = service.platform.receive
    return received if translate is None else translate(received)


def _infer(service: Service, called: Request, gone: Callable[[], bool]) -> Response:
    """A JSON body as in the OpenAI routes (``messages``: a chat, ``input``: embeddings); any other is the prompt."""
    if _mimetype(called) == "application/json":
        return _ask(service, as_json_object(called.body), gone)
    prompt = called.body.decode(errors="replace")
    if not prompt.strip():
        raise ApiError(400, 'expected {"prompt": …} as JSON, or the prompt itself as the body', param="prompt")
    # curl -d sends JSON as a form.
    return _ask(service, _object(prompt) if prompt.lstrip().startswith("{") else {"prompt": prompt}, gone)


def _mimetype(called: Request) -> str:
    return called.headers.get("content-type", "").partition(";")[0].strip().lower()


def _ask(service: Service, body: dict[str, object], gone: Callable[[], bool]) -> Response:
    from ..openai.routes import complete, converse, embed_texts

    answer = converse if "messages" in body else embed_texts if "input" in body else complete
    return answer(service, body, gone)


def _object(text: str) -> dict[str, object]:
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"prompt": text}
    return value if isinstance(value, dict) else {"prompt": text}
