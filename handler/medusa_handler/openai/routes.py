"""The routes of a served model: /v1, /tokenize and /detokenize, and those of its engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, jsonify, request

from ..faults import ApiError, invalid
from ..http.app import ModelRoutes
from ..http.body import json_object, refuse_pages_unasked
from .adapters import adapter_models, load_adapter, model_entry, unload_adapter
from .body import fields, parameters
from .body.parameters import Body
from .engine_routes import engine_routes
from .inference import infer
from .relay import answer_or_relay, relay
from .requested_model import adapter_of, check_model

if TYPE_CHECKING:
    from ..http.request_runner import RequestRunner
    from ..service import Service


_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_OTHERS = "engine"  # stands for all routes of an engine's own server in the metrics, where each path would add a line


def model_routes(service: Service, runner: RequestRunner) -> ModelRoutes:
    """Return the routes and the answer to ``POST /`` that ``http.app`` adds for a served model."""
    return ModelRoutes(_blueprint(service, runner), infer)


def _blueprint(service: Service, runner: RequestRunner) -> Blueprint:
    routes = Blueprint("openai", __name__)
    routes.register_blueprint(engine_routes(service, runner))

    @routes.before_request
    def refuse_pages() -> None:
        refuse_pages_unasked(service.settings.cors_origins)

    def add(path: str, answer: Callable[[Body, Callable[[], bool]], Response], method: str = "POST") -> None:
        def view(**parameters: str) -> Response:
            def run() -> Response:
                is_disconnected = runner.disconnect_check()
                own = partial(answer, json_object() if method == "POST" else parameters, is_disconnected)
                return answer_or_relay(
                    service, own, is_disconnected, request.environ.get("RAW_URI") or request.full_path
                )

            return runner.run(path, run)

        routes.add_url_rule(path, path, view, methods=[method])

    add("/v1/completions", lambda body, is_disconnected: _calls().complete(service, body, is_disconnected))
    add("/v1/chat/completions", lambda body, is_disconnected: _calls().complete_chat(service, body, is_disconnected))
    add("/v1/embeddings", lambda body, is_disconnected: _calls().embed_texts(service, body, is_disconnected))
    add("/pooling", lambda body, is_disconnected: _calls().pool_texts(service, body, is_disconnected))
    add("/classify", lambda body, is_disconnected: _calls().classify_texts(service, body, is_disconnected))
    for path in ("/score", "/v1/score"):
        add(path, lambda body, is_disconnected: _calls().score_texts(service, body, is_disconnected))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        add(path, lambda body, is_disconnected: _calls().rerank_texts(service, body, is_disconnected))
    add("/tokenize", lambda body, is_disconnected: _tokenize(service, body, is_disconnected))
    add("/detokenize", lambda body, is_disconnected: _detokenize(service, body))
    if service.own_routes:
        _add_models(routes, service)
    add("/v1/responses", lambda body, is_disconnected: _calls().create_response(service, body, is_disconnected))
    add("/v1/responses/input_tokens", lambda body, left: _calls().count_input_tokens(service, body, left))
    if not service.can_relay:  # else vLLM's own server has them
        add("/v1/messages", lambda body, is_disconnected: _calls().create_message(service, body, is_disconnected))
        add("/v1/messages/count_tokens", lambda body, left: _calls().count_message_tokens(service, body, left))
        add("/v1/load_lora_adapter", lambda body, is_disconnected: load_adapter(service, body, is_disconnected))
        add("/v1/unload_lora_adapter", lambda body, is_disconnected: unload_adapter(service, body))
    if service.can_relay:
        _add_others(routes, service, runner)
    elif service.function is None:  # else the function has every path that is not below /v1
        routes.add_url_rule("/version", "/version", _version)
    return routes


def _calls() -> Any:
    """Import the functions that answer requests. They are a tenth of the app's imports, so the first request does it.

    A request that is passed on to the engine's own server does not need them.
    """
    from . import calls

    return calls


def _add_models(routes: Blueprint, service: Service) -> None:
    @routes.get("/v1/models")
    def models() -> Response:
        return jsonify({"object": "list", "data": [_model(service), *adapter_models(service)]})

    @routes.get("/v1/models/<path:name>")
    def model(name: str) -> Response:
        if adapter_of(service, check_model(service, {"model": name})) is None:
            return jsonify(_model(service))
        found = next((each for each in adapter_models(service) if each["id"] == name), None)
        if found is None:  # another request has just unloaded it
            raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
        return jsonify(found)


def _add_others(routes: Blueprint, service: Service, runner: RequestRunner) -> None:
    """Pass every other path on to the engine's server; with a function, which takes the rest, only /v1 and /v2."""

    def others(_path: str) -> Response:
        return runner.run(_OTHERS, lambda: relay(service, runner.disconnect_check()))

    for prefix in ("/",) if service.function is None else ("/v1/", "/v2/"):
        path = f"{prefix}<path:_path>"
        routes.add_url_rule(path, path, others, methods=_METHODS, provide_automatic_options=False)


def _version() -> Response:
    from medusa_runtime import __version__

    return jsonify({"version": __version__})


def _model(service: Service) -> dict[str, Any]:
    info, name = service.engine.info if service.engine is not None else None, service.model.name
    return model_entry(service, name, root=name, max_model_len=None if info is None else info.max_model_len)


def _tokenize(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer like vLLM's /tokenize: the body has ``prompt`` as text, or ``messages``."""
    assert service.engine is not None
    fields.check_fields(body, fields.TOKENIZE)
    check_model(service, body)
    text: Any
    if "messages" in body:
        from . import chat

        template = service.model.chat_template(is_disconnected)
        text = template.render(chat.messages(body), chat.template_arguments(body), is_disconnected)
    else:
        text = body.get("prompt")
        if not isinstance(text, str):
            raise invalid("prompt", "text", text)
    tokens = service.engine.tokenize(text, parameters.flag(body, "add_special_tokens", "messages" not in body))
    info = service.engine.info
    limit = info and info.max_model_len
    return jsonify({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})


def _detokenize(service: Service, body: Body) -> Response:
    fields.check_fields(body, fields.DETOKENIZE)
    check_model(service, body)
    tokens = parameters.token_ids(body.get("tokens"), "tokens")
    return jsonify({"prompt": _calls().text_of(service, tokens, "tokens")})
