"""/openapi.json: what this instance's routes take and give (OpenAPI 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .platform import LIVE

if TYPE_CHECKING:
    from .service import Service

_ANY: dict[str, Any] = {}
_COUNT = {"type": "integer", "minimum": 1}
_SAMPLING = {
    "model": {"type": "string"},
    "stream": {"type": "boolean"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "max_tokens": _COUNT,
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "seed": {"type": "integer"},
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
}
_COMPLETION = {
    "type": "object",
    "required": ["prompt"],
    "properties": {"prompt": {"type": "string", "minLength": 1}, **_SAMPLING},
}
_CHAT = {
    "type": "object",
    "required": ["messages"],
    "properties": {"messages": {"type": "array", "minItems": 1, "items": _MESSAGE}, **_SAMPLING},
}

_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_INPUT = {"type": "string", "minLength": 1}
_EMBEDDINGS = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "input": {"anyOf": [_INPUT, _TOKENS, {"type": "array", "minItems": 1, "items": {"anyOf": [_INPUT, _TOKENS]}}]},
        "model": {"type": "string"},
        "encoding_format": {"enum": ["float", "base64"]},
        "dimensions": _COUNT,
        "truncate_prompt_tokens": {"type": "integer", "minimum": -1},
    },
}


def describe(service: Service, probes: Mapping[str, str]) -> dict[str, Any]:
    """The document; ``probes`` are paths and what each tells."""
    paths: dict[str, Any] = {path: {"get": _probe(kind)} for path, kind in probes.items()}
    paths["/metrics"] = {"get": _operation("Metrics in Prometheus' text format", {"200": _answer("text/plain")})}
    paths["/timeline"] = {"get": _operation("Where this start's time went", {"200": _answer("application/json")})}
    paths["/openapi.json"] = {"get": _operation("This document", {"200": _answer("application/json")})}
    if service.engine is not None:
        paths |= _model_paths()
    call = {"post": _function_call(service)}
    paths |= dict.fromkeys(("/", *service.platform.aliases), call) | dict(service.platform.paths)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": service.model_name if service.engine is not None else "function", "version": "1"},
        "paths": paths,
    }
    if service.settings.token is not None:
        document["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        document["security"] = [{"token": []}]
    return document


def _probe(kind: str) -> dict[str, Any]:
    responses = {"200": _answer("application/json")}
    if kind != LIVE:
        responses["503"] = _answer("application/json", text="Not ready")
    return {"summary": "A probe", "responses": responses, "security": []}


def _model_paths() -> dict[str, Any]:
    return {
        "/v1/models": {"get": _operation("The served model", {"200": _answer("application/json")})},
        "/v1/completions": {"post": _call("A completion", _COMPLETION, "application/json", "text/event-stream")},
        "/v1/chat/completions": {"post": _call("A chat", _CHAT, "application/json", "text/event-stream")},
        "/v1/embeddings": {"post": _call("Vectors of texts, by an encoder", _EMBEDDINGS, "application/json")},
        "/tokenize": {"post": _call("Text to token ids", _object("prompt", {"type": "string"}), "application/json")},
        "/detokenize": {
            "post": _call(
                "Token ids to text",
                _object("tokens", {"type": "array", "items": {"type": "integer", "minimum": 0}}),
                "application/json",
            )
        },
    }


def _object(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [name], "properties": {name: schema}}


def _function_call(service: Service) -> dict[str, Any]:
    """The function's own types are its own; a model without one takes a prompt."""
    if service.function is None and service.engine is not None:
        bodies = {"anyOf": [_COMPLETION, _CHAT, _EMBEDDINGS]}
        call = _call("A completion, a chat or embeddings", bodies, "application/json", "text/event-stream")
        call["requestBody"]["content"]["text/plain"] = {"schema": {"type": "string"}}
        return call
    answers = {"default": {"description": "What the function answers", "content": {"*/*": {"schema": _ANY}}}}
    return {
        "summary": "The function",
        "requestBody": {"content": {"*/*": {"schema": _ANY}}},
        "responses": answers,
    }


def _call(summary: str, schema: dict[str, Any], *kinds: str) -> dict[str, Any]:
    refusals = {"400": "Cannot be served", "401": "No token", "404": "No such model", "413": "Too large"}
    later = {"422": "Does not fit", "429": "Too many", "503": "Not ready", "504": "Took too long"}
    answers = {status: _answer("application/json", text=text) for status, text in (refusals | later).items()}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return _operation(summary, {"200": _answer(*kinds), **answers}) | {"requestBody": body}


def _operation(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": responses}


def _answer(*kinds: str, text: str = "As asked") -> dict[str, Any]:
    return {"description": text, "content": {kind: {"schema": _ANY} for kind in kinds}}
