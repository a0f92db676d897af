"""``POST /`` without a function: the model answers a body of the OpenAI routes, or a bare prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from flask import Response

from ..faults import ApiError, compact
from ..http.body import as_json_object
from .relay import answer_or_relay

if TYPE_CHECKING:
    from ..contract import Request
    from ..service import Service


def infer(service: Service, called: Request, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a JSON body like an OpenAI route (with ``messages``: chat, ``input``: embeddings, else completion).

    Any other body is a prompt.
    """
    if called.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        return _answer(service, as_json_object(called.body), is_disconnected)
    prompt = called.body.decode(errors="replace")
    if not prompt.strip():
        raise ApiError(400, 'expected {"prompt": …} as JSON, or the prompt itself as the body', param="prompt")
    # curl -d sends JSON as a form.
    return _answer(service, _object(prompt) if prompt.lstrip().startswith("{") else {"prompt": prompt}, is_disconnected)


def _answer(service: Service, body: dict[str, object], is_disconnected: Callable[[], bool]) -> Response:
    from .calls import complete, complete_chat, embed_texts  # imported here, so that the app does not wait for it

    if "messages" in body:
        answer, target = complete_chat, "/v1/chat/completions"
    elif "input" in body:
        answer, target = embed_texts, "/v1/embeddings"
    else:
        answer, target = complete, "/v1/completions"
    own = partial(answer, service, body, is_disconnected)
    return answer_or_relay(service, own, is_disconnected, target, compact(body))


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"prompt": text}
    return value if isinstance(value, dict) else {"prompt": text}
