"""/openapi.json: a description of this instance's routes (OpenAPI 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..faults import is_of_messages
from ..platform import LIVE

if TYPE_CHECKING:
    from ..service import Service

_ANY: dict[str, Any] = {}
_FUNCTION_METHODS = ("get", "post", "put", "patch", "delete")


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field that also accepts null, which means the default."""
    return {"anyOf": [schema, {"type": "null"}]}


_COUNT = {"type": "integer", "minimum": 1}
_LARGE = {"type": "integer", "minimum": 1 - 2**63, "maximum": 2**63 - 1}
_FLAG = _or_null({"type": "boolean"})
_PENALTY = _or_null({"type": "number", "minimum": -2, "maximum": 2})
_STOP = {"type": "string", "minLength": 1}
_CUT = _or_null({"anyOf": [{"const": -1}, _COUNT]})
_SIDE = {"enum": ["left", "right", None]}
_SAMPLING = {
    "model": _or_null({"type": "string"}),
    "stream": _or_null({"type": "boolean"}),
    "temperature": _or_null({"type": "number", "minimum": 0, "maximum": 2}),
    "top_p": _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "max_tokens": _or_null(_COUNT),
    "n": _or_null({"type": "integer", "minimum": 1, "maximum": 128}),
    "seed": _or_null(_LARGE),
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 16}, {"type": "null"}]},
    "top_k": _or_null({"type": "integer", "minimum": -1, "maximum": 2**31}),
    "min_p": _or_null({"type": "number", "minimum": 0, "maximum": 1}),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _or_null({"type": "number", "exclusiveMinimum": 0}),
    "min_tokens": _or_null({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}),
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "add_special_tokens": _FLAG,
    "truncate_prompt_tokens": _CUT,
    "truncation_side": _SIDE,
    "return_token_ids": _FLAG,
    "return_tokens_as_token_ids": _FLAG,
    "stream_options": _or_null(
        {"type": "object", "properties": {"include_usage": _FLAG}, "additionalProperties": False}
    ),
}
_OTHERS = (
    *("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs"),
    *("response_format", "structured_outputs"),
    *("user", "metadata", "store"),
)
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": _or_null({"type": "string"}),
        "reasoning": _or_null({"type": "string"}),
        "reasoning_content": _or_null({"type": "string"}),
    },
}
_CHAT_OTHERS = (
    *("tools", "tool_choice", "parallel_tool_calls", "top_logprobs"),
    *("chat_template_kwargs", "documents", "reasoning_effort"),
)
_COMPLETION = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": {"type": "string", "minLength": 1},
        "best_of": _or_null(_COUNT),
        "echo": _FLAG,
        **_SAMPLING,
        **dict.fromkeys(_OTHERS, _ANY),
    },
    "additionalProperties": False,
}
_CHAT = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "max_completion_tokens": _or_null(_COUNT),
        "add_generation_prompt": _FLAG,
        "continue_final_message": _FLAG,
        "include_reasoning": _FLAG,
        "return_prompt_text": _FLAG,
        **_SAMPLING,
        **dict.fromkeys((*_OTHERS, *_CHAT_OTHERS), _ANY),
    },
    "additionalProperties": False,
}
_LONG_COUNT = _COUNT | {"maximum": 2**63 - 1}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
_CALL_ID = {"type": "string"}


def _texts(*kinds: str) -> dict[str, Any]:
    """A text, or a list of parts of these kinds."""
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": list(kinds)}, "text": {"type": "string"}},
        "additionalProperties": False,
    }
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}


_CONTENT = _texts("input_text", "output_text")
_REASONING = _or_null(_texts("reasoning_text", "summary_text"))


def _item(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {**required, **optional, "id": _ANY, "status": _ANY}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


_ITEM = {
    "anyOf": [
        _item(
            {"role": {"enum": ["user", "assistant", "system", "developer"]}, "content": _CONTENT},
            type={"const": "message"},
        ),
        _item(
            {"type": {"const": "function_call"}, "call_id": _CALL_ID, "name": _NAME, "arguments": {"type": "string"}}
        ),
        _item({"type": {"const": "reasoning"}}, content=_REASONING, summary=_REASONING),
        _item({"type": {"const": "function_call_output"}, "call_id": _CALL_ID, "output": _CONTENT}),
    ]
}
_NOT_OF_RESPONSES = (
    *("n", "max_tokens", "stream_options", "truncate_prompt_tokens", "truncation_side"),
    *("return_token_ids", "return_tokens_as_token_ids"),
)
_RESPONSE: dict[str, Any] = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "input": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": _ITEM}]},
        "instructions": _or_null({"type": "string"}),
        "max_output_tokens": _or_null(_LONG_COUNT),
        "max_tool_calls": _or_null(_LONG_COUNT),
        "top_logprobs": _or_null({"type": "integer", "minimum": 0, "maximum": 20}),
        "include_reasoning": _FLAG,
        "truncation": {"enum": ["auto", "disabled", None]},
        **{name: schema for name, schema in _SAMPLING.items() if name not in _NOT_OF_RESPONSES},
        **dict.fromkeys(
            (
                *("tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "include", "metadata"),
                *("chat_template_kwargs", "structured_outputs", "stop_token_ids", "logit_bias", "user", "store"),
            ),
            _ANY,
        ),
    },
    "additionalProperties": False,
}
_INPUT_TOKENS = _RESPONSE | {
    "properties": {
        name: schema
        for name, schema in _RESPONSE["properties"].items()
        if name in ("input", "instructions", "model", "tools", "tool_choice", "text", "reasoning", "truncation", "user")
    }
}
_BLOCKS = _texts("text")
_MESSAGE_OF_BLOCKS = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
    "additionalProperties": False,
}
_COUNT_TOKENS: dict[str, Any] = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE_OF_BLOCKS},
        "system": _or_null(_BLOCKS),
        "model": _SAMPLING["model"],
        **dict.fromkeys(("tools", "tool_choice", "thinking", "output_config", "metadata", "cache_control"), _ANY),
        **dict.fromkeys(("chat_template_kwargs", "context_management"), _ANY),
    },
    "additionalProperties": False,
}
_MESSAGES = _COUNT_TOKENS | {
    "required": ["messages", "max_tokens"],
    "properties": {
        **_COUNT_TOKENS["properties"],
        "max_tokens": _LONG_COUNT,
        "temperature": _or_null({"type": "number", "minimum": 0, "maximum": 1}),
        "stop_sequences": _SAMPLING["stop"],
        **{name: _SAMPLING[name] for name in ("stream", "top_p", "top_k", "min_p", "seed", "repetition_penalty")},
    },
}
_TEXT = {"type": "string", "minLength": 1}
_INPUT = {"type": "string"}


def _tokens(vocab_size: int | None, least: int = 1) -> dict[str, Any]:
    token = {"type": "integer", "minimum": 0} | ({} if vocab_size is None else {"maximum": vocab_size - 1})
    return {"type": "array", "minItems": least, "items": token}


def _pooled(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """A body for a model that reads whole texts."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {
            **required,
            "model": _or_null({"type": "string"}),
            "truncate_prompt_tokens": _CUT,
            "truncation_side": _SIDE,
            "use_activation": _FLAG,
            "user": _ANY,
            **optional,
        },
        "additionalProperties": False,
    }


def _inputs(vocab_size: int | None) -> dict[str, Any]:
    one = {"anyOf": [_INPUT, _tokens(vocab_size)]}
    return {"anyOf": [*one["anyOf"], {"type": "array", "minItems": 1, "maxItems": 2048, "items": one}]}


def _of_input(vocab_size: int | None) -> dict[str, Any]:
    """The bodies of the routes for single texts."""
    form = {
        "encoding_format": {"enum": ["float", "base64", "bytes", "bytes_only", None]},
        "embed_dtype": {"enum": ["float32", "float16", "bfloat16", None]},
        "endianness": {"enum": ["native", "little", "big", None]},
        "dimensions": _or_null(_COUNT),
    }
    required = {"input": _inputs(vocab_size)}
    return {
        "/v1/embeddings": _pooled(required, add_special_tokens=_FLAG, **form),
        "/pooling": _pooled(required, add_special_tokens=_FLAG, task=_or_null({"type": "string"}), **form),
        "/classify": _pooled(required, add_special_tokens=_FLAG),
    }


def _fits() -> dict[str, Any]:
    document = {"type": "object", "required": ["text"], "properties": {"text": _INPUT}, "additionalProperties": False}
    text = {"anyOf": [_INPUT, document]}
    either = {"anyOf": [*text["anyOf"], {"type": "array", "minItems": 1, "maxItems": 2048, "items": text}]}
    count = _or_null({"type": "integer", "minimum": 0})
    limits = {"max_tokens_per_query": count, "max_tokens_per_doc": count}
    order = _pooled({"query": _INPUT, "documents": either}, top_n=count, return_documents=_FLAG, **limits)
    scores = dict.fromkeys(_SCORES, _pooled({"text_1": either, "text_2": either}, **limits))
    return scores | dict.fromkeys(_RANKINGS, order)


_SCORES = ("/score", "/v1/score")
_RANKINGS = ("/rerank", "/v1/rerank", "/v2/rerank")
_SUMMARIES = {
    "/v1/completions": "A completion",
    "/v1/chat/completions": "A chat",
    "/v1/responses": "A response",
    "/v1/responses/input_tokens": "How many tokens the prompt of a response has",
    "/v1/messages": "A message, as Anthropic's interface has it",
    "/v1/messages/count_tokens": "How many tokens the prompt of a message has",
    "/v1/embeddings": "Vectors",
    "/pooling": "Vectors, or the numbers of labels",
    "/classify": "The labels of texts",
    **dict.fromkeys(_SCORES, "How well texts fit"),
    **dict.fromkeys(_RANKINGS, "Documents by how well they fit a query"),
}


def describe(service: Service, probes: Mapping[str, str]) -> dict[str, Any]:
    """Return the OpenAPI document. ``probes`` maps each probe's path to what it reports, such as LIVE."""
    paths: dict[str, Any] = {path: {"get": _probe(kind)} for path, kind in probes.items()}
    paths["/metrics"] = {"get": _operation("Metrics in Prometheus' text format", {"200": _answer("text/plain")})}
    paths["/timeline"] = {"get": _operation("Where this start's time went", {"200": _answer("application/json")})}
    paths["/openapi.json"] = {"get": _operation("This document", {"200": _answer("application/json")})}
    paths |= _model_paths(service) | _function_paths(service) | dict(service.platform.openapi_paths)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": service.model.name if service.engine is not None else "function", "version": "1"},
        "paths": paths,
    }
    if service.settings.token is not None or service.settings.api_key_file is not None:
        document["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        document["security"] = [{"token": []}]
    return document


def _probe(kind: str) -> dict[str, Any]:
    responses = {"200": _answer("application/json")}
    if kind != LIVE:
        responses["503"] = _answer("application/json", text="Not ready")
    return {"summary": "A probe", "responses": responses, "security": []}


def _bodies(service: Service) -> dict[str, dict[str, Any]]:
    """Return the model's routes with the schema of each one's body.

    That is all of them until the engine has reported whether the model is an encoder.
    """
    info = service.engine.info if service.engine is not None else None
    vocab_size = None if info is None else info.vocab_size
    pooled = _of_input(vocab_size) | _fits()
    writes = {"/v1/completions": _COMPLETION, "/v1/chat/completions": _CHAT}
    writes |= {"/v1/responses": _RESPONSE, "/v1/responses/input_tokens": _INPUT_TOKENS}
    if not service.can_relay:
        writes |= {"/v1/messages": _MESSAGES, "/v1/messages/count_tokens": _COUNT_TOKENS}
    if info is None:
        return writes | pooled
    not_there = {"encoder": "/classify", "classifier": "/v1/embeddings"}.get(info.architecture)
    return writes if not_there is None else {path: body for path, body in pooled.items() if path != not_there}


def _model_paths(service: Service) -> dict[str, Any]:
    if service.engine is None:
        return {}
    info = service.engine.info
    tokens = _tokens(None if info is None else info.vocab_size, 0)
    described: dict[str, Any] = {
        "/v1/models": {"get": _operation("The served models", {"200": _answer("application/json")})},
        "/v1/models/{name}": {
            "parameters": [_path_parameter("name")],
            "get": _operation("One served model", {status: _answer("application/json") for status in ("200", "404")}),
        },
        "/tokenize": {"post": _call("Text to token ids", _object("prompt", {"type": "string"}), "application/json")},
        "/detokenize": {"post": _call("Token ids to text", _object("tokens", tokens), "application/json")},
    }
    if not service.can_relay and service.function is None:
        described["/version"] = {"get": _operation("The server's version", {"200": _answer("application/json")})}
    if not service.can_relay:
        load = {"lora_name": _TEXT, "lora_path": _TEXT, "load_inplace": _FLAG}
        for path, summary, fields in (
            ("/v1/load_lora_adapter", "Load a LoRA adapter", load),
            ("/v1/unload_lora_adapter", "Unload a LoRA adapter", {"lora_name": _TEXT, "lora_int_id": _ANY}),
        ):
            required = [name for name in fields if name in ("lora_name", "lora_path")]
            schema = {"type": "object", "required": required, "properties": fields}
            operation = _call(summary, schema, "text/plain")
            operation["responses"]["403"] = _answer("application/json", text="Not allowed by the operator")
            described[path] = {"post": operation}
    for path, schema in _bodies(service).items():
        kinds = ["application/json", "text/event-stream"][: 2 if "stream" in schema["properties"] else 1]
        described[path] = {"post": _call(_SUMMARIES[path], schema, *kinds)}
    return described


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _object(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [name], "properties": {name: schema}}


def _function_paths(service: Service) -> dict[str, Any]:
    """Return the paths of ``POST /``. A function may take and return anything; the model takes its routes' bodies."""
    if service.function is not None:
        answers = {"default": {"description": "What the function answers", "content": {"*/*": {"schema": _ANY}}}}
        call: dict[str, Any] = {"summary": "The function", "responses": answers}
        body = {"requestBody": {"content": {"*/*": {"schema": _ANY}}}}
        methods = {method: call | ({} if method in ("get", "delete") else body) for method in _FUNCTION_METHODS}
        below = {"/{path}": {"parameters": [_path_parameter("path")], **methods}}
    elif service.engine is not None:
        bodies = [body for path, body in _bodies(service).items() if not is_of_messages(path)]
        call = _call("The model", {"anyOf": bodies}, "application/json", "text/event-stream")
        call["requestBody"]["content"]["text/plain"] = {"schema": {"type": "string", "pattern": "^\\s*[^\\s{]"}}
        methods, below = {"post": call}, {}
    else:
        return {}
    return dict.fromkeys(("/", *service.platform.aliases), methods) | below


def _call(summary: str, schema: dict[str, Any], *kinds: str) -> dict[str, Any]:
    refusals = {"400": "Cannot be served", "401": "No token", "404": "No such model", "413": "Too large"}
    later = {"422": "Does not fit", "429": "Too many", "503": "Not ready", "504": "Took too long"}
    answers = {status: _answer("application/json", text=text) for status, text in (refusals | later).items()}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return _operation(summary, {"200": _answer(*kinds), **answers}) | {"requestBody": body}


def _operation(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": responses}


def _answer(*kinds: str, text: str = "The answer") -> dict[str, Any]:
    return {"description": text, "content": {kind: {"schema": _ANY} for kind in kinds}}
