"""/v1/embeddings and /pooling: the body's inputs, and the shape of the answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flask import Response, jsonify
from medusa_runtime.engine.base import EmbedOptions

from ..faults import invalid
from ..model.embeddings import Input, embeddings
from .body import parameters
from .body.parameters import Body, token_ids
from .vector_format import VectorFormat

if TYPE_CHECKING:
    from medusa_runtime.engine.base import Embedding

    from ..service import Service

_MOST_INPUTS = 2048
_EXPECTED = "text, a list of token ids, or a list of either"


def embed(service: Service, body: Body, model: str, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a request for embeddings. Raises ApiError, RequestError, EngineError, ClientDisconnectedError."""
    given, form = inputs(body), VectorFormat.parse(body)
    options = options_of(body)._replace(dimensions=parameters.integer(body, "dimensions", None, 1))
    vectors = embeddings(service.model, given, is_disconnected, options)
    if form.is_bytes:
        return _as_bytes("embd", model, form, vectors)
    data = [
        {"object": "embedding", "index": index, "embedding": form.value(vector.data)}
        for index, vector in enumerate(vectors)
    ]
    return listed("embd", model, data, vectors)


def pool(service: Service, body: Body, model: str, is_disconnected: Callable[[], bool]) -> Response:
    """Answer with an encoder's vectors or a classifier's numbers. Raises as ``embed`` does."""
    given, form = inputs(body), VectorFormat.parse(body)
    classifies = service.model.wait_info(is_disconnected).architecture == "classifier"
    task = "classify" if classifies else "embed"
    if body.get("task") not in (None, task):
        raise invalid("task", f"{task}, the only one of this model", body["task"])
    dimensions = None if classifies else parameters.integer(body, "dimensions", None, 1)
    options = options_of(body)._replace(dimensions=dimensions, classify=classifies)
    vectors = embeddings(service.model, given, is_disconnected, options)
    if form.is_bytes:
        return _as_bytes("pooling", model, form, vectors)
    data = [
        {"index": index, "object": "pooling", "data": form.value(vector.data)} for index, vector in enumerate(vectors)
    ]
    return listed("pooling", model, data, vectors)


def listed(kind: str, model: str, data: list[dict[str, Any]], found: Sequence[Embedding]) -> Response:
    """Return an answer with a list of objects, in vLLM's form."""
    return jsonify({"object": "list", "data": data, **_head(kind, model), "usage": usage(found)})


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{os.urandom(16).hex()}", "created": int(time.time()), "model": model}


def _as_bytes(kind: str, model: str, form: VectorFormat, vectors: Sequence[Embedding]) -> Response:
    """Return all vectors as bytes, one behind the other. As in vLLM, a header says which are whose."""
    packed = [form.packed(vector.data) for vector in vectors]
    response = Response(b"".join(packed), content_type="application/octet-stream")
    if form.encoding == "bytes":
        entries, start = [], 0
        for index, (data, vector) in enumerate(zip(packed, vectors, strict=True)):
            place = {"index": index, "start": start, "end": start + len(data), "shape": [len(vector.data) // 4]}
            entries.append({**place, "embed_dtype": form.dtype, "endianness": form.order})
            start += len(data)
        response.headers["metadata"] = json.dumps({**_head(kind, model), "data": entries, "usage": usage(vectors)})
    return response


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
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list) and item:
            found.append(token_ids(item, "input"))
        else:
            raise invalid("input", _EXPECTED, item)
    return found


def options_of(body: Body) -> EmbedOptions:
    """Return how a body's inputs are read, and whether vectors are scaled. Raises ApiError 400."""
    truncate, side = parameters.truncation(body)
    activate = None if body.get("use_activation") is None else parameters.flag(body, "use_activation")
    special = parameters.flag(body, "add_special_tokens", True)
    return EmbedOptions(truncate=truncate, truncate_left=side == "left", add_special_tokens=special, activate=activate)


def usage(found: Sequence[Embedding]) -> dict[str, int]:
    """Return an answer's ``usage``: the tokens of all inputs."""
    tokens = sum(vector.tokens for vector in found)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
