"""The engine over HTTP, for a function elsewhere (``--engine cluster``): token ids and log-probabilities unchanged.

Requests and deltas are the frames of the engine's own socket (``medusa_runtime.engine.frames``).
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, jsonify
from medusa_runtime.engine import frames
from medusa_runtime.engine.base import Delta, EmbedOptions

from ..faults import ApiError, ClientDisconnectedError, compact, invalid, stream_error
from ..http import sse
from ..http.body import json_object
from ..merge import Item
from ..model.generation import Generation
from .body.parameters import Body
from .requested_model import adapter_of, check_model

if TYPE_CHECKING:
    from ..http.request_runner import RequestRunner
    from ..service import Service

logger = logging.getLogger(__name__)

# The files that a chat template and the model's name are made from. The tokenizer stays with the engine.
FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def engine_routes(service: Service, runner: RequestRunner) -> Blueprint:
    routes = Blueprint("engine", __name__)

    @routes.post("/medusa/describe")
    def describe() -> Response:
        return runner.run("/medusa/describe", lambda: _describe(service, json_object(), runner.disconnect_check()))

    @routes.post("/medusa/generate")
    def generate() -> Response:
        return runner.run("/medusa/generate", lambda: _generate(service, json_object(), runner.disconnect_check()))

    @routes.post("/medusa/call")
    def call() -> Response:
        return runner.run("/medusa/call", lambda: _call(service, json_object(), runner.disconnect_check()))

    return routes


def _describe(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer with the engine's description of itself (EngineInfo), and the checkpoint's small files."""
    check_model(service, body)
    info = service.model.wait_info(is_disconnected)
    assert service.region is not None
    files = {name: data for name in FILES if (data := service.region.file(name)) is not None}
    shown = {name: base64.b64encode(data).decode() for name, data in files.items()}
    return jsonify({"info": info._asdict(), "files": shown})


def _generate(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Run one request, in the form of the engine's socket, and stream its deltas."""
    adapter = adapter_of(service, check_model(service, body))
    frame = body.get("frame")
    if not isinstance(frame, dict):
        raise invalid("frame", "an object", frame)
    request = frames.request_from_frame(frame)
    given = request.id
    generation = Generation(
        service.model, [replace(request, id=f"remote-{os.urandom(16).hex()}", adapter=adapter)], is_disconnected
    )
    try:
        events = generation.events(service.settings.heartbeat_s)
        first = next(events)  # an error before the first token still has its own status
        while first is None:
            first = next(events)
    except BaseException:
        generation.close()
        raise
    response = Response(_events(service, given, first, events), content_type=sse.CONTENT_TYPE)
    response.call_on_close(generation.close)
    return response


def _events(service: Service, name: str, first: Item[Delta], events: Iterator[Item[Delta] | None]) -> Iterator[bytes]:
    item: Item[Delta] | None = first
    try:
        while True:
            if item is None:
                yield sse.heartbeat(service)
            else:
                yield sse.event(frames.delta_to_frame(item.value._replace(request_id=name)))
            try:
                item = next(events)
            except StopIteration:
                break
    except ClientDisconnectedError:
        return
    except Exception as error:  # noqa: BLE001 the status has been sent, so only the stream can report it
        known = stream_error(error, name, lambda: logger.exception("request %s failed", name))
        yield sse.event(known.body())
    yield sse.DONE


def _call(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Call one of the engine's methods."""
    check_model(service, body)
    assert service.engine is not None
    method, arguments = body.get("method"), body.get("arguments")
    if not isinstance(arguments, dict):
        raise invalid("arguments", "an object", arguments)

    def wait_check() -> None:
        if is_disconnected():
            raise ClientDisconnectedError

    value: Any
    try:
        if method == "tokenize":
            value = service.engine.tokenize(**arguments)
        elif method == "detokenize":
            value = service.engine.detokenize(**arguments)
        elif method == "embed":
            inputs = arguments.pop("inputs", None)
            found = service.engine.embed(inputs, EmbedOptions(**arguments), wait_check=wait_check)
            value = [[vector.tokens, base64.b64encode(vector.data).decode()] for vector in found]
        else:
            raise invalid("method", "tokenize, detokenize or embed", method)
    except TypeError as error:
        raise ApiError(400, f"arguments: {error}", param="arguments", code="invalid_value") from None
    return Response(compact({"value": value}), content_type="application/json")
