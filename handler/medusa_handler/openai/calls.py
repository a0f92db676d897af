"""The calls of the OpenAI interface: body → generation → answer.

The modules of chats, embeddings and classifiers are imported at the first such call, so that no start waits for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flask import g, jsonify, request
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.errors import ContextLengthError, RequestError, json_excerpt

from ..faults import ApiError, UnsupportedRequestError, compact, invalid
from . import completion
from .answer import Envelope
from .answer_format import Asked, answer_format, check_none_hidden, check_shown, field_names, with_form
from .body import fields, parameters
from .body.output_constraint import output_constraint
from .body.parameters import Body
from .cache_salt import cache_salt
from .generation_response import GenerationPlan, respond
from .requested_model import adapter_of, check_model
from .token_ids import NO_TOKEN_IDS, Prompt, TokenIds, prepared

if TYPE_CHECKING:
    from flask import Response

    from ..model.chat_template import ChatTemplate
    from ..service import Service
    from .messages.request import MessagesRequest
    from .responses.request import ResponsesRequest

_MOST_SEQUENCES = 128  # prompts x n of one request
_MOST_RESTRICTIONS = 1 << 20  # token ids of logit_bias and allowed_token_ids, in all sequences of one request
_MOST_BEST_OF = 20
_STREAM_OPTIONS = frozenset(("include_usage", "continuous_usage_stats", "include_obfuscation"))


def complete(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a completion."""
    fields.check_generation_fields(body, fields.COMPLETION, can_relay=service.can_relay)
    model = check_model(service, body)
    prompts = completion.prompts(body)
    keep = parameters.count(body, "n", 1, 1, _MOST_SEQUENCES)
    per_prompt = parameters.count(body, "best_of", keep, keep, max(keep, _MOST_BEST_OF))
    _check_sequences(service, len(prompts), per_prompt)
    stream = parameters.flag(body, "stream")
    if stream and per_prompt > keep:
        raise invalid("best_of", "n, because a stream cannot be ranked", per_prompt)
    logprobs = parameters.logprob_count(body, "logprobs")
    echo = parameters.flag(body, "echo")
    max_tokens = parameters.count(body, "max_tokens", 16)
    if echo and service.can_relay and (logprobs is not None or not max_tokens):
        raise UnsupportedRequestError(400, "echo: the engine's own server scores prompts", param="echo")
    if not max_tokens and not echo:
        raise invalid("max_tokens", "a whole number of at least 1, or 0 with echo", 0)
    asked = parameters.prompt_logprob_count(body)
    scored = [count for count in (asked, logprobs if echo else None) if count is not None]
    params = parameters.sampling(
        body,
        service.model.sampling_defaults(is_disconnected),
        max_tokens=max_tokens,
        logprobs=0 if per_prompt > keep and logprobs is None else logprobs,
        prompt_logprobs=max(scored, default=None),
    )
    constraint = output_constraint(body)
    if constraint is not None:
        params = replace(params, structured_outputs=constraint.outputs)
    special = parameters.flag(body, "add_special_tokens", True)
    given = prompts
    prompts = prepared(service, body, given, add_special_tokens=special, is_disconnected=is_disconnected)
    echoed = given if body.get("truncate_prompt_tokens") is None else prompts
    echoes = [_text(service, prompt) for prompt in echoed for _ in range(keep)] if echo else []
    name = _answer_id("cmpl", body)
    requests = _requests(prompts, params, per_prompt, special, stream)
    requests = _for_caller(service, body, model, requests)
    ids = TokenIds.parse(body).of_prompts(prompts, keep)
    envelope = Envelope(name, model, completion.CompletionFormatter(logprobs, echoes, asked, ids))
    names = field_names(constraint) | ({"prompt_logprobs": "logprobs"} if asked is None else {})
    return respond(
        service,
        GenerationPlan(requests, envelope, per_prompt, keep, stream, *_usage(body), names),
        is_disconnected,
    )


def complete_chat(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a chat."""
    from . import chat
    from .tools.choice import tools_of

    fields.check_generation_fields(body, fields.CHAT, can_relay=service.can_relay)
    model = check_model(service, body)
    messages = chat.messages(body)
    arguments = chat.template_arguments(body)
    count = parameters.count(body, "n", 1, 1, _MOST_SEQUENCES)
    _check_sequences(service, 1, count)
    alternatives = parameters.logprob_count(body, "top_logprobs")
    has_logprobs = parameters.flag(body, "logprobs")
    if alternatives and not has_logprobs:
        raise invalid("top_logprobs", "logprobs to be true with it", alternatives)
    logprobs = (alternatives or 0) if has_logprobs else None
    limit = parameters.integer(body, "max_completion_tokens", parameters.integer(body, "max_tokens", None, 1), 1)
    tools = tools_of(body)
    check_none_hidden(service, tools)
    requested = output_constraint(body)
    template = service.model.chat_template(is_disconnected)
    scored = parameters.prompt_logprob_count(body)
    prompt = template.render(messages, arguments, is_disconnected)
    continued = messages[-1]["content"] if arguments["continue_final_message"] else None
    asked = Asked(body, tools, requested, arguments.get("reasoning_effort"))
    parser, reasoning, constraint = answer_format(service, template, prompt, asked, is_disconnected, continued)
    shows_reasoning, ids = parameters.flag(body, "include_reasoning", True), TokenIds.parse(body)
    if reasoning is not None and not shows_reasoning:
        logprobs, ids = None, NO_TOKEN_IDS  # its tokens would show it
    defaults = service.model.sampling_defaults(is_disconnected)
    params = parameters.sampling(body, defaults, max_tokens=limit, logprobs=logprobs, prompt_logprobs=scored)
    params = with_form(params, constraint, reasoning, parsed=parser is not None)
    # If tool_choice forces a call, the answer's constraint contains the tools, so the template need not show them.
    check_shown(template, {"tools": tools.choice == "auto" and tools.offered, "documents": arguments["documents"]})
    name = _answer_id("chatcmpl", body)
    # The template writes the special tokens itself.
    stream = parameters.flag(body, "stream")
    special = parameters.flag(body, "add_special_tokens", False)
    prompts = prepared(
        service, body, [prompt], add_special_tokens=special, is_disconnected=is_disconnected, field="messages"
    )
    requests = _requests(prompts, params, count, special, stream)
    requests = _for_caller(service, body, model, requests)
    # As in vLLM: a model that is not prompted to answer continues the last message.
    role = "assistant" if arguments["add_generation_prompt"] else str(messages[-1]["role"])
    text = prompt if parameters.flag(body, "return_prompt_text") else None
    formatter = chat.ChatFormatter(
        logprobs, parser, tools.parallel, tools.choice, scored, shows_reasoning, role, ids.of_prompts(prompts, 1), text
    )
    envelope = Envelope(name, model, formatter)
    names = {"prompt": "messages", "logprobs": "top_logprobs"} | field_names(constraint)
    if body.get("max_completion_tokens") is not None:
        names["max_tokens"] = "max_completion_tokens"
    plan = GenerationPlan(requests, envelope, count, count, stream, *_usage(body), names, reasoning)
    return respond(service, plan, is_disconnected)


def create_response(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a request of the Responses API."""
    from .responses.answer import ResponsePlan
    from .responses.output import response_output
    from .responses.request import ResponsesRequest

    fields.check_generation_fields(body, fields.RESPONSES, fields.REFUSED_FOR_RESPONSES, can_relay=service.can_relay)
    model = check_model(service, body)
    asked = ResponsesRequest.parse(body)
    tools = asked.tools
    check_none_hidden(service, tools)
    template = service.model.chat_template(is_disconnected)
    defaults = service.model.sampling_defaults(is_disconnected)
    params = parameters.sampling(body, defaults, max_tokens=asked.max_tokens, logprobs=asked.alternatives)
    check_shown(template, {"tools": tools.choice == "auto" and tools.offered})
    special = parameters.flag(body, "add_special_tokens", False)
    prompt = _response_prompt(service, asked, template, special, is_disconnected)
    effort = asked.template_arguments.get("reasoning_effort")
    answered = Asked(body, tools, asked.constraint, effort, "reasoning.effort")
    parser, reasoning, constraint = answer_format(service, template, prompt, answered, is_disconnected)
    params = with_form(params, constraint, reasoning, parsed=parser is not None)
    name = f"resp_{os.urandom(16).hex()}"
    requests = _for_caller(service, body, model, [GenerateRequest(f"{name}-0", prompt, params, special)])
    output = response_output(
        None if parser is None else parser(),
        parallel=tools.parallel,
        alternatives=asked.alternatives,
        shows_reasoning=asked.shows_reasoning,
    )
    used = {"temperature": params.temperature, "top_p": params.top_p}
    head = {"id": name, "object": "response", "model": model, **asked.shown, **used}
    try:
        compact(head)
    except RecursionError:
        raise invalid("tools", "objects of less depth", "ones that are nested too deeply") from None
    names = {"prompt": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
    plan = ResponsePlan(requests[0], head, output, asked.streams, names | field_names(constraint), reasoning)
    return respond(service, plan, is_disconnected)


def count_input_tokens(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer how many tokens the prompt of a request of the Responses API would have."""
    from .responses.request import ResponsesRequest

    fields.check_fields(body, fields.INPUT_TOKENS, fields.REFUSED_FOR_RESPONSES)
    asked = ResponsesRequest.parse(body)
    check_model(service, body)
    special = parameters.flag(body, "add_special_tokens", False)
    template = service.model.chat_template(is_disconnected)
    prompt = _response_prompt(service, asked, template, special, is_disconnected)
    assert service.engine is not None
    counted = len(service.engine.tokenize(prompt, special))
    return jsonify({"object": "response.input_tokens", "input_tokens": counted})


def create_message(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a request of Anthropic's Messages API."""
    from .messages.answer import MessagePlan
    from .messages.blocks import Blocks
    from .messages.request import MessagesRequest
    from .output import Output

    fields.check_fields(body, fields.MESSAGES, fields.REFUSED_FOR_MESSAGES)
    asked = MessagesRequest.parse(body)
    model = check_model(service, body)
    tools = asked.tools
    template = service.model.chat_template(is_disconnected)
    check_shown(template, {"tools": tools.choice == "auto" and tools.offered})
    assert asked.max_tokens is not None
    # Clients ask for as many as their own model may write, so a smaller context is no error.
    most = min(asked.max_tokens, service.model.wait_info(is_disconnected).max_model_len)
    defaults = service.model.sampling_defaults(is_disconnected)
    params = parameters.sampling(asked.sampling, defaults, max_tokens=most, logprobs=None)
    special = parameters.flag(body, "add_special_tokens", False)
    prompt = _message_prompt(asked, template, is_disconnected)
    answered = Asked(body, tools, asked.constraint, asked.effort_for(template), "output_config.effort")
    continued = asked.messages[-1]["content"] if asked.continues else None
    parser, reasoning, constraint = answer_format(service, template, prompt, answered, is_disconnected, continued)
    params = with_form(params, constraint, reasoning, parsed=parser is not None)
    name = f"msg_{os.urandom(16).hex()}"
    [request] = _for_caller(service, body, model, [GenerateRequest(f"{name}-0", prompt, params, special)])
    blocks = Blocks()
    output = Output(None if parser is None else parser(), blocks, parallel=tools.parallel)
    names = {"prompt": "messages", "stop": "stop_sequences"} | field_names(constraint)
    plan = MessagePlan(request, name, model, blocks, output, asked.streams, names, reasoning)
    return respond(service, plan, is_disconnected)


def count_message_tokens(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer how many tokens the prompt of a request of Anthropic's Messages API would have."""
    from .messages.request import MessagesRequest

    fields.check_fields(body, fields.COUNT_TOKENS, fields.REFUSED_FOR_MESSAGES)
    asked = MessagesRequest.parse(body, counts=True)
    check_model(service, body)
    prompt = _message_prompt(asked, service.model.chat_template(is_disconnected), is_disconnected)
    assert service.engine is not None
    counted = service.engine.tokenize(prompt, parameters.flag(body, "add_special_tokens", False))
    return jsonify({"input_tokens": len(counted)})


def _message_prompt(asked: MessagesRequest, template: ChatTemplate, is_disconnected: Callable[[], bool]) -> str:
    """Return the prompt of a request of the Messages API.

    A template may refuse a message of the system behind others, as Claude Code sends it. It gets all of them as one.
    """
    from .messages.turns import with_one_system

    arguments = asked.template_arguments(template)
    try:
        return template.render(asked.messages, arguments, is_disconnected)
    except ApiError as error:
        if error.code != "bad_messages" or not any(each["role"] == "system" for each in asked.messages[1:]):
            raise
    return template.render(with_one_system(asked.messages), arguments, is_disconnected)


def _response_prompt(
    service: Service,
    asked: ResponsesRequest,
    template: ChatTemplate,
    special: bool,
    is_disconnected: Callable[[], bool],
) -> str:
    """Return the prompt of a request of the Responses API, without the turns that ``truncation`` leaves out."""
    from .responses.truncation import truncate

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return template.render(messages, asked.template_arguments, is_disconnected)
        except (ApiError, ContextLengthError) as error:
            error.param = "input" if error.param == "messages" else error.param
            raise

    messages = asked.messages
    if asked.truncates:
        limit = service.model.wait_info(is_disconnected).max_model_len - (asked.max_tokens or 1)
        messages = truncate(messages, lambda kept: _fits(service, partial(render, kept), special, limit))
    return render(messages)


def _fits(service: Service, render: Callable[[], str], special: bool, limit: int) -> bool:
    """Return whether the prompt that ``render`` returns has at most ``limit`` tokens."""
    assert service.engine is not None
    try:
        return len(service.engine.tokenize(render(), special)) <= limit
    except ContextLengthError:  # it is too long to be tokenized at all
        return False


def embed_texts(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a request for embeddings."""
    from .embeddings import embed

    return _run_pooling(embed, "embeddings", fields.EMBEDDINGS, service, body, is_disconnected)


def pool_texts(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a request for vectors of texts, or for the labels' numbers."""
    from .embeddings import pool

    return _run_pooling(pool, "pooling", fields.POOLING, service, body, is_disconnected)


def classify_texts(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a request for the labels of texts."""
    from .ranking import classify

    return _run_pooling(classify, "classifiers", fields.CLASSIFY, service, body, is_disconnected)


def score_texts(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a request for how well texts fit."""
    from .ranking import score

    return _run_pooling(score, "classifiers", fields.SCORE, service, body, is_disconnected)


def rerank_texts(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Answer a request for the documents that belong to a query."""
    from .ranking import rerank

    return _run_pooling(rerank, "classifiers", fields.RERANK, service, body, is_disconnected)


def _run_pooling(
    answer: Callable[[Service, Body, str, Callable[[], bool]], Response],
    what: str,
    known: frozenset[str],
    service: Service,
    body: Body,
    is_disconnected: Callable[[], bool],
) -> Response:
    if service.can_relay:
        raise UnsupportedRequestError(400, f"the engine's own server answers for {what}")
    fields.check_fields(body, known)
    return answer(service, body, _require_base_model(service, check_model(service, body)), is_disconnected)


def _for_caller(service: Service, body: Body, model: str, requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Add the adapter that the body names, and who shares what is computed of the prompts."""
    adapter, salt = adapter_of(service, model), cache_salt(body)
    return [replace(each, adapter=adapter, cache_salt=salt) for each in requests] if adapter or salt else requests


def _require_base_model(service: Service, model: str) -> str:
    """Return the model's name. Raises ApiError 400 for an adapter."""
    if adapter_of(service, model) is not None:
        raise ApiError(
            400,
            f"model: {json_excerpt(model)} is an adapter, and adapters continue text; expected /v1/completions or "
            "/v1/chat/completions",
            param="model",
            code="invalid_value",
        )
    return model


def _check_sequences(service: Service, prompts: int, per_prompt: int) -> None:
    """Refuse more sequences than the engine has places for. It would never admit them. Raises ApiError 400."""
    settings = service.settings
    most = min(_MOST_SEQUENCES, settings.max_concurrency + settings.max_waiting)
    if prompts * per_prompt > most:
        text = f"expected at most {most} sequences, found {prompts} prompts x {per_prompt}"
        raise ApiError(400, text, param="n" if prompts == 1 else "prompt", code="invalid_value")


def _answer_id(kind: str, body: Body) -> str:
    """Return an answer's id. As in vLLM, it has the request's: of X-Request-Id, or else of ``request_id``."""
    own = body.get("request_id")
    is_named = "X-Request-Id" not in request.headers and isinstance(own, str) and own
    return f"{kind}-{own if is_named else g.request_id}"


def _requests(
    prompts: list[Prompt],
    params: SamplingParams,
    per_prompt: int,
    add_special_tokens: bool,
    stream: bool,
) -> list[GenerateRequest]:
    for field in ("logit_bias", "allowed_token_ids"):
        given = len(getattr(params, field) or ()) * len(prompts) * per_prompt
        if given > _MOST_RESTRICTIONS:
            expected = f"expected at most {_MOST_RESTRICTIONS:,} token ids in all sequences together, found {given:,}"
            raise ApiError(400, f"{field}: {expected}", param=field)
    requests: list[GenerateRequest] = []
    name = os.urandom(16).hex()  # a client may send two requests with the same id
    for prompt in prompts:
        for number in range(per_prompt):
            # The sequences of one prompt must differ from each other, but be the same for another request of this seed.
            own = params if params.seed is None or not number else replace(params, seed=params.seed + number)
            if number and not stream:  # a whole answer has the scores of the first one for all
                own = replace(own, prompt_logprobs=None)
            requests.append(GenerateRequest(f"{name}-{len(requests)}", prompt, own, add_special_tokens))
    return requests


def _usage(body: Body) -> tuple[bool, bool]:
    """Return whether a stream ends with the usage, and whether each chunk has the usage so far."""
    options = fields.inner_object(body, "stream_options", _STREAM_OPTIONS)
    if options is None:
        return False, False
    parameters.flag(options, "include_obfuscation")  # it asks for random characters, which are never sent
    return parameters.flag(options, "include_usage"), parameters.flag(options, "continuous_usage_stats")


def _text(service: Service, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else text_of(service, prompt, "prompt")


def text_of(service: Service, token_ids: Sequence[int], field: str) -> str:
    """Return the text of the token ids in a field of the body. Raises ApiError 400, which names the field."""
    assert service.engine is not None
    try:
        return service.engine.detokenize(list(token_ids))
    except RequestError as error:
        message = str(error).replace("token_ids: ", f"{field}: ", 1)  # the engine's name of the field
        raise ApiError(400, message, param=field, code="invalid_value") from None
