"""/classify, /score and /rerank, in the form of vLLM's answers.

How well two texts fit is what a sequence classifier with one label says of the pair, or the cosine of an encoder's
vectors.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flask import Response, jsonify

from ..faults import invalid
from ..model.embeddings import Input, embeddings, floats
from .body import parameters
from .body.parameters import Body
from .embeddings import inputs, listed, options_of, usage

if TYPE_CHECKING:
    from medusa_runtime.engine.base import Embedding, EmbedOptions

    from ..service import Service

_MOST_DOCUMENTS = 2048
# The most characters of all pairs together, in which a query counts for each of its documents: as many as texts have
# that fill the model's context, by the rule for single texts (engine/serving/tokenizer.py), or so many if that is more.
_MOST_CHARACTERS, _CHARACTERS_PER_TOKEN = 1 << 24, 8
# The names that vLLM has for the two sides of /score.
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def classify(service: Service, body: Body, model: str, is_disconnected: Callable[[], bool]) -> Response:
    """Answer with the probability of each label. Raises ApiError, RequestError and EngineError."""
    found = embeddings(service.model, inputs(body), is_disconnected, options_of(body)._replace(classify=True))
    labels = _labels(service)
    data = []
    for index, vector in enumerate(found):
        probs = floats(vector.data)
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append({"index": index, "label": labels.get(str(best)), "probs": probs, "num_classes": len(probs)})
    return listed("classify", model, data, found)


def score(service: Service, body: Body, model: str, is_disconnected: Callable[[], bool]) -> Response:
    """Answer with how well each text fits another one. Raises as ``classify`` does."""
    first, second = next((names for names in _PAIRS if names[1] in body), _PAIRS[0])
    queries, documents = _texts(body, first), _texts(body, second)
    if len(queries) not in (1, len(documents)):
        raise invalid(first, f"one text, or as many as {second} has ({len(documents)})", len(queries))
    scores, found = _fits(service, body, queries, documents, is_disconnected, field=second)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return listed("score", model, data, found)


def rerank(service: Service, body: Body, model: str, is_disconnected: Callable[[], bool]) -> Response:
    """Answer with the documents that fit a query best. Raises as ``classify`` does."""
    query = body.get("query")
    if not isinstance(query, str):
        raise invalid("query", "a text", query)
    documents = _texts(body, "documents")
    shown = parameters.flag(body, "return_documents", True)
    top = parameters.integer(body, "top_n", 0, 0) or len(documents)
    scores, found = _fits(service, body, [query], documents, is_disconnected, field="documents")
    results = [
        {"index": number}
        | ({"document": {"text": documents[number]}} if shown else {})
        | {"relevance_score": scores[number]}
        for number in sorted(range(len(documents)), key=lambda number: -scores[number])[:top]
    ]
    return jsonify({"id": f"rerank-{os.urandom(16).hex()}", "model": model, "usage": usage(found), "results": results})


def _texts(body: Body, name: str) -> list[str]:
    value: Any = body.get(name)
    found: list[str] = [_text(one) for one in (value if isinstance(value, list) else [value])]
    if not found or not all(isinstance(one, str) for one in found):
        raise invalid(name, "a text or a list of texts", value)
    if len(found) > _MOST_DOCUMENTS:
        raise invalid(name, f"at most {_MOST_DOCUMENTS} of them", len(found))
    return found


def _text(value: Any) -> Any:
    """Return the text of a document, which Cohere's and Jina's clients may send as an object."""
    return value["text"] if isinstance(value, Mapping) and value.keys() == {"text"} else value


def _fits(
    service: Service,
    body: Body,
    queries: list[str],
    documents: list[str],
    is_disconnected: Callable[[], bool],
    *,
    field: str,
) -> tuple[list[float], list[Embedding]]:
    """Return how well each document fits its query, or the only one, and what the engine has found for that.

    ``field`` is the body's that has the documents.
    """
    info = service.model.wait_info(is_disconnected)
    classifies = info.architecture == "classifier"
    all_queries = queries * (len(documents) // len(queries))
    most = max(_MOST_CHARACTERS, _CHARACTERS_PER_TOKEN * info.max_model_len * len(documents))
    if classifies and (count := sum(map(len, (*all_queries, *documents)))) > most:
        expected = f"at most {most} characters, counting a query for each of its documents"
        raise invalid(field, expected, count)
    options = options_of(body)._replace(
        classify=classifies,
        most_first=parameters.integer(body, "max_tokens_per_query", 0, 0) or None,
        most_second=parameters.integer(body, "max_tokens_per_doc", 0, 0) or None,
    )
    if not classifies:
        parts: list[tuple[list[str], EmbedOptions]] = [([*queries, *documents], options)]
        if options.most_first != options.most_second:
            parts = [(queries, options), (documents, options._replace(most_first=options.most_second))]
        found = [vector for part, own in parts for vector in embeddings(service.model, part, is_disconnected, own)]
        return _cosines(found[: len(queries)], found[len(queries) :]), found
    asked: list[Input] = list(zip(all_queries, documents, strict=True))
    found = embeddings(service.model, asked, is_disconnected, options)
    vectors = [floats(vector.data) for vector in found]
    if len(vectors[0]) != 1:
        raise invalid("model", "a classifier with one label, or an encoder", f"one with {len(vectors[0])} labels")
    return [vector[0] for vector in vectors], found


def _cosines(queries: list[Embedding], documents: list[Embedding]) -> list[float]:
    """Return the cosine of each document's vector and its query's, or the only query's."""
    scores, query = list[float](), list[float]()
    for number, document in enumerate(documents):
        if number < len(queries):
            query = floats(queries[number].data)
        scores.append(_cosine(query, floats(document.data)))  # one at a time: as numbers, they take 8 times the memory
    return scores


def _cosine(one: list[float], other: list[float]) -> float:
    length = math.hypot(*one) * math.hypot(*other)
    return sum(map(operator.mul, one, other)) / length if length else 0.0


def _labels(service: Service) -> dict[str, Any]:
    """Return the labels' names, by their numbers as text. Call when the weights are there: then the file is, too."""
    region = service.model.region
    found = json.loads((region.file("config.json") if region is not None else None) or b"{}").get("id2label")
    return found if isinstance(found, dict) else {}
