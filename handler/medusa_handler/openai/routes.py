"""The routes of a served model: /v1, /tokenize and /detokenize, and those of its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, jsonify

from ..http.app import ModelRoutes
from ..http.body import json_object
from . import chat, fields, parameters
from .calls import check_model, complete, converse, embed_texts
from .engine_routes import engine_routes
from .parameters import Body
from .prompt import infer

if TYPE_CHECKING:
    from ..http.work import Work
    from ..service import Service


def model_routes(service: Service, work: Work) -> ModelRoutes:
    """The routes and the answer to ``POST /`` that ``http.app`` adds for a served model."""
    return ModelRoutes(_blueprint(service, work), infer)


def _blueprint(service: Service, work: Work) -> Blueprint:
    routes = Blueprint("openai", __name__)
    routes.register_blueprint(engine_routes(service, work))

    @routes.get("/v1/models")
    def models() -> Response:
        return jsonify({"object": "list", "data": [_model(service)]})

    @routes.get("/v1/models/<path:name>")
    def model(name: str) -> Response:
        check_model(service, {"model": name})
        return jsonify(_model(service))

    @routes.post("/v1/completions")
    def completions() -> Response:
        return work.run("/v1/completions", lambda: complete(service, json_object(), work.gone()))

    @routes.post("/v1/chat/completions")
    def chat_completions() -> Response:
        return work.run("/v1/chat/completions", lambda: converse(service, json_object(), work.gone()))

    @routes.post("/v1/embeddings")
    def embed() -> Response:
        return work.run("/v1/embeddings", lambda: embed_texts(service, json_object(), work.gone()))

    @routes.post("/tokenize")
    def tokenize() -> Response:
        return work.run("/tokenize", lambda: _tokenize(service, json_object()))

    @routes.post("/detokenize")
    def detokenize() -> Response:
        return work.run("/detokenize", lambda: _detokenize(service, json_object()))

    return routes


def _model(service: Service) -> dict[str, Any]:
    info = service.engine.info if service.engine is not None else None
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "medusa-runtime",
        "root": service.model.name,
        "parent": None,
        "max_model_len": None if info is None else info.max_model_len,
    }


def _tokenize(service: Service, body: Body) -> Response:
    """vLLM's /tokenize: ``prompt`` as text, or ``messages``."""
    assert service.engine is not None
    fields.check_fields(body, fields.TOKENIZE)
    check_model(service, body)
    text: Any
    if "messages" in body:
        text = service.model.chat_template(lambda: False).render(chat.messages(body), chat.template_arguments(body))
    else:
        text = body.get("prompt")
        if not isinstance(text, str):
            raise parameters.invalid("prompt", "text", text)
    tokens = service.engine.tokenize(text, parameters.flag(body, "add_special_tokens", "messages" not in body))
    info = service.engine.info
    return jsonify({"count": len(tokens), "max_model_len": info and info.max_model_len, "tokens": tokens})


def _detokenize(service: Service, body: Body) -> Response:
    assert service.engine is not None
    fields.check_fields(body, fields.DETOKENIZE)
    check_model(service, body)
    tokens = parameters.token_ids(body.get("tokens"), "tokens")
    return jsonify({"prompt": service.engine.detokenize(list(tokens))})
