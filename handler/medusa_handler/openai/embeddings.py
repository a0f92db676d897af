"""/v1/embeddings: the body's inputs, and the shape of the answer."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flask import Response, jsonify

from ..faults import invalid
from ..model.embeddings import Input, embeddings, floats
from .body import parameters
from .body.parameters import Body, token_ids

if TYPE_CHECKING:
    from medusa_runtime.engine.base import Embedding

    from ..service import Service

_MOST_INPUTS = 2048
_FORMS = ("float", "base64")
_EXPECTED = "text, a list of token ids, or a list of either, none of them empty"


def embed(service: Service, body: Body, model: str, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a request for embeddings. Raises ApiError, RequestError, EngineError, ClientDisconnectedError."""
    found = inputs(body)
    form = body.get("encoding_format")
    if form is not None and form not in _FORMS:
        raise invalid("encoding_format", " or ".join(_FORMS), form)
    dimensions = parameters.integer(body, "dimensions", None, 1)
    vectors = embeddings(service.model, found, is_disconnected, dimensions=dimensions, truncate=truncation(body))
    data = [
        {"object": "embedding", "index": index, "embedding": _shown(vector.data, form)}
        for index, vector in enumerate(vectors)
    ]
    return jsonify({"object": "list", "data": data, "model": model, "usage": usage(vectors)})


def inputs(body: Body) -> list[Input]:
    """Return the inputs of a body. Raises ApiError 400."""
    value = body.get("input")
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        return [token_ids(value, "input")]
    items = value if isinstance(value, list) else [value]
    if not items:
        raise invalid("input", _EXPECTED, value)
    if len(items) > _MOST_INPUTS:
        raise invalid("input", f"at most {_MOST_INPUTS} of them", len(items))
    found: list[Input] = []
    for item in items:
        if isinstance(item, str) and item:
            found.append(item)
        elif isinstance(item, list) and item:
            found.append(token_ids(item, "input"))
        else:
            raise invalid("input", _EXPECTED, item)
    return found


def truncation(body: Body) -> int | None:
    """Return to how many tokens inputs are cut: -1 for the model's limit, None for no cut. Raises ApiError 400."""
    truncate = parameters.integer(body, "truncate_prompt_tokens", None, -1)
    if truncate == 0:
        raise invalid("truncate_prompt_tokens", "-1 (the model's limit) or 1 and more", truncate)
    return truncate


def usage(found: list[Embedding]) -> dict[str, int]:
    """Return an answer's ``usage``: the tokens of all inputs."""
    tokens = sum(vector.tokens for vector in found)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _shown(data: bytes, form: Any) -> str | list[float]:
    return base64.b64encode(data).decode() if form == "base64" else floats(data)
