"""Content negotiation: a result in a type that the caller accepts (RFC 9110, section 12.5.1)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from medusa_handler.cloud_event import is_cloud_event_class
from medusa_handler.contract import HttpError, Response

_EVENTS, _JSON, _LINES = "text/event-stream", "application/json", "application/jsonlines"
_TEXT, _BYTES = "text/plain", "application/octet-stream"


def collect_stream(result: Any) -> Any:
    """Return a stream as a whole, for a platform without streams: texts are joined, other items are a list."""
    if not isinstance(result, Iterator):
        return result
    items = list(result)
    return "".join(items) if items and all(isinstance(item, str) for item in items) else items


def negotiate(accept: str, result: Any) -> Any:
    """Return ``result`` in the form of the type most wanted by ``accept``, the Accept header, that it can have.

    Raises HttpError 406, which lists the possible forms.
    """
    if isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], int):
        return result if result[1] >= 400 else with_body(negotiate(accept, result[0]), result)
    return _choose_form(accept, result, _result_forms(result))


def negotiate_answer(accept: str, answer: Response) -> Any:
    """Like ``negotiate``, for a model's own answer."""
    return _choose_form(accept, answer, _answer_forms(answer))


def _choose_form(accept: str, result: Any, forms: dict[str, Any]) -> Any:
    accepted = _ranges(accept)
    if not accepted or not forms:
        return result
    for wanted in accepted:
        for kind, make in forms.items():
            if wanted in ("*/*", kind, kind.partition("/")[0] + "/*"):
                return make()
    raise HttpError(406, f"expected Accept to be one of {', '.join(forms)}, found {accept}")


def with_body(body: Any, result: tuple[Any, ...]) -> Any:
    """Return ``result``, a tuple (body, status[, headers]), with another body."""
    if not isinstance(body, Response):
        return (body, *result[1:])
    return replace(body, status=result[1], headers=dict(body.headers) | dict(*result[2:3]))


def _ranges(accept: str) -> list[str]:
    """Return the media ranges of an Accept header, the most wanted first, without those of q=0."""
    weighed: list[tuple[float, str]] = []
    for entry in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        weight = next((value[2:] for value in parameters if value.startswith("q=")), "1")
        try:
            quality = float(weight)
        except ValueError:
            raise HttpError(400, f"Accept: cannot read the weight in {entry.strip()!r}") from None
        if kind and quality > 0:
            weighed.append((quality, _LINES if kind in ("application/x-jsonlines", "application/jsonl") else kind))
    return [kind for _, kind in sorted(weighed, key=lambda item: -item[0])]


def _result_forms(result: Any) -> dict[str, Any]:
    """Return, by content type, functions that make the forms a result can have, its own first.

    There are none for a result that must not be changed.
    """
    if result is None or isinstance(result, Response) or is_cloud_event_class(type(result)):
        return {}
    if isinstance(result, Iterator):
        return {_EVENTS: lambda: result, _LINES: lambda: _lines(result), _JSON: lambda: list(result)}
    if isinstance(result, str):
        return {_TEXT: lambda: result, _BYTES: lambda: result.encode(), _JSON: lambda: _as_json(result)}
    if isinstance(result, bytes | bytearray | memoryview):
        return {_BYTES: lambda: result}
    forms = {_JSON: lambda: result, _LINES: lambda: _lines(iter(result if isinstance(result, list) else [result]))}
    return {**forms, _BYTES: lambda: Response(_dumps(result), content_type=_BYTES)}


def _answer_forms(answer: Response) -> dict[str, Any]:
    """Return the forms of a model's answer, like ``_result_forms``; none for an error."""
    if (answer.content_type or "").partition(";")[0] != _JSON or answer.status >= 400:
        return {}
    assert isinstance(answer.body, bytes)
    choices = json.loads(answer.body).get("choices")
    if choices is None:  # vectors and labels have no other form
        return {_JSON: lambda: answer}

    def texts() -> list[str]:
        return [choice["text"] if "text" in choice else choice["message"]["content"] or "" for choice in choices]

    return {
        _JSON: lambda: answer,
        _TEXT: lambda: "\n".join(texts()),
        _LINES: lambda: _lines(iter([{"text": text} for text in texts()])),
        _BYTES: lambda: "\n".join(texts()).encode(),
    }


def _lines(items: Iterator[Any]) -> Response:
    return Response((_dumps(item) + "\n" for item in items), content_type=_LINES)


def _as_json(text: str) -> Response:
    return Response(_dumps(text), content_type=_JSON)


def _dumps(value: Any) -> str:
    from medusa_handler.http.function_response import to_json

    return to_json(value)
