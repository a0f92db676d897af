"""/classify and /rerank: the results of a sequence classifier, in the form of vLLM's answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flask import Response, jsonify

from ..faults import invalid
from ..model.embeddings import Input, embeddings, floats
from .body import parameters
from .body.parameters import Body
from .embeddings import inputs, truncation

if TYPE_CHECKING:
    from ..service import Service

_MOST_DOCUMENTS = 2048


def classify(service: Service, body: Body, model: str, is_disconnected: Callable[[], bool]) -> Response:
    """Answer with the probability of each label. Raises ApiError, RequestError and EngineError."""
    found = embeddings(service.model, inputs(body), is_disconnected, truncate=truncation(body), classify=True)
    labels = _labels(service)
    data = []
    for index, vector in enumerate(found):
        probs = floats(vector.data)
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append({"index": index, "label": labels.get(str(best)), "probs": probs, "num_classes": len(probs)})
    tokens = sum(vector.tokens for vector in found)
    return jsonify(
        {
            "id": f"classify-{os.urandom(16).hex()}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def rerank(service: Service, body: Body, model: str, is_disconnected: Callable[[], bool]) -> Response:
    """Answer with the documents that fit a query best, by a classifier with one label."""
    query, documents = body.get("query"), body.get("documents")
    if not isinstance(query, str) or not query:
        raise invalid("query", "a text that is not empty", query)
    if not isinstance(documents, list) or not documents or not all(isinstance(one, str) and one for one in documents):
        raise invalid("documents", "a list of texts, none of them empty", documents)
    if len(documents) > _MOST_DOCUMENTS:
        raise invalid("documents", f"at most {_MOST_DOCUMENTS} of them", len(documents))
    top = parameters.integer(body, "top_n", 0, 0) or len(documents)
    pairs: list[Input] = [(query, document) for document in documents]
    found = embeddings(service.model, pairs, is_disconnected, truncate=truncation(body), classify=True)
    scores = [floats(vector.data) for vector in found]
    if len(scores[0]) != 1:
        raise invalid("model", "a classifier with one label, for /rerank", f"one with {len(scores[0])}")
    order = sorted(range(len(documents)), key=lambda number: -scores[number][0])[:top]
    results = [
        {"index": number, "document": {"text": documents[number]}, "relevance_score": scores[number][0]}
        for number in order
    ]
    tokens = sum(vector.tokens for vector in found)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return jsonify({"id": f"rerank-{os.urandom(16).hex()}", "model": model, "usage": usage, "results": results})


def _labels(service: Service) -> dict[str, Any]:
    """Return the labels' names, by their numbers as text. Call when the weights are there: then the file is, too."""
    region = service.model.region
    found = json.loads((region.file("config.json") if region is not None else None) or b"{}").get("id2label")
    return found if isinstance(found, dict) else {}
