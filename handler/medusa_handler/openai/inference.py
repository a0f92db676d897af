"""``POST /`` without a function: the model answers a body of the OpenAI routes, or a bare prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from flask import Response

from ..contract import load_json
from ..faults import ApiError, compact
from ..http.body import as_json_object
from .body.parameters import Body
from .relay import answer_or_relay, relay

if TYPE_CHECKING:
    from ..contract import Request
    from ..service import Service

_Call = Callable[["Service", Body, Callable[[], bool]], Response]


def infer(service: Service, called: Request, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a JSON body like the route that it fits. Any other body is a prompt.

    ``messages`` make it a chat, ``query`` with ``documents`` a ranking, and ``text_1`` with ``text_2`` a score. Of an
    ``input``, a classifier has the labels, an encoder a vector, and any other model a response to it. The rest are
    completions.
    """
    if called.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        return _answer(service, as_json_object(called.body), is_disconnected)
    prompt = called.body.decode(errors="replace")
    if not prompt.strip():
        raise ApiError(
            400,
            'expected {"prompt": …} as JSON, or the prompt itself as the body',
            param="prompt",
            code="invalid_value",
        )
    # curl -d sends JSON as a form.
    return _answer(service, _object(prompt) if prompt.lstrip().startswith("{") else {"prompt": prompt}, is_disconnected)


def _answer(service: Service, body: dict[str, object], is_disconnected: Callable[[], bool]) -> Response:
    from . import calls  # imported here, so that the app does not wait for it

    answer: _Call
    if "messages" in body:
        answer, target = calls.complete_chat, "/v1/chat/completions"
    elif "documents" in body and "query" in body:
        answer, target = calls.rerank_texts, "/rerank"
    elif "text_1" in body and "text_2" in body:
        answer, target = calls.score_texts, "/score"
    elif "input" in body:
        relayed = _relayed_input(service, body, is_disconnected) if service.can_relay else None
        if relayed is not None:
            return relayed
        answer, target = _of_input(service, is_disconnected)
    else:
        answer, target = calls.complete, "/v1/completions"
    own = partial(answer, service, body, is_disconnected)
    return answer_or_relay(service, own, is_disconnected, target, compact(body))


def _relayed_input(service: Service, body: dict[str, object], is_disconnected: Callable[[], bool]) -> Response | None:
    """Return the answer of an engine's own server to an ``input``, or None if it has no route for one.

    It has only the route for what its model does, and 404 for the other.
    """
    for path in ("/v1/embeddings", "/classify"):
        response = relay(service, is_disconnected, path, compact(body))
        if response.status_code != HTTPStatus.NOT_FOUND:
            return response
        response.close()
    return None


def _of_input(service: Service, is_disconnected: Callable[[], bool]) -> tuple[_Call, str]:
    """Return the call that answers an ``input``, and its path on an engine's own server."""
    from . import calls

    if service.can_relay:
        return calls.create_response, "/v1/responses"
    architecture = service.model.wait_info(is_disconnected).architecture
    if architecture == "classifier":
        return calls.classify_texts, "/classify"
    if architecture == "encoder":
        return calls.embed_texts, "/v1/embeddings"
    return calls.create_response, "/v1/responses"


def _object(text: str) -> dict[str, object]:
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        return {"prompt": text}
    return value if isinstance(value, dict) else {"prompt": text}
