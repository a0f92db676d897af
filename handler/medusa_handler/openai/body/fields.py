"""The fields of each route: those that count, those that change no answer, and those that are refused with a reason.

Any other field is refused, so that a misspelt one does not silently get its default. A test compares the names with the
request models of the installed vLLM and of the openai client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from medusa_runtime.errors import json_excerpt, printable

from ...faults import TEXT_ONLY, ApiError, UnsupportedRequestError, invalid
from .parameters import Body


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAMPLING = _names(
    "model stream stream_options n temperature top_p top_k min_p max_tokens min_tokens seed stop stop_token_ids "
    "include_stop_str_in_output ignore_eos skip_special_tokens add_special_tokens repetition_penalty presence_penalty "
    "frequency_penalty logit_bias allowed_token_ids bad_words logprobs prompt_logprobs response_format "
    "structured_outputs cache_salt"
)
_TOKENS = _names("return_token_ids return_tokens_as_token_ids truncate_prompt_tokens truncation_side")
# The engine's own server answers them, where there is one.
OF_RELAYING_ENGINES = _TOKENS | _names(
    "prompt_logprobs allowed_token_ids bad_words include_reasoning return_prompt_text"
)
_TEMPLATE = _names(
    "messages tools add_generation_prompt continue_final_message chat_template_kwargs documents reasoning_effort"
)
COMPLETION = _SAMPLING | _TOKENS | {"prompt", "best_of", "echo"}
CHAT = (_SAMPLING | _TOKENS | _TEMPLATE) | _names(
    "max_completion_tokens top_logprobs tool_choice parallel_tool_calls include_reasoning return_prompt_text"
)
RESPONSES = (_SAMPLING - _names("n max_tokens logprobs prompt_logprobs response_format")) | _names(
    "input instructions tools tool_choice parallel_tool_calls text reasoning max_output_tokens top_logprobs include "
    "truncation max_tool_calls chat_template_kwargs include_reasoning"
)
INPUT_TOKENS = _names(
    "model input instructions tools tool_choice parallel_tool_calls text reasoning truncation chat_template_kwargs "
    "add_special_tokens"
)
# Some of them are about Anthropic's own service, and have no effect: its clients send them as a matter of course.
_OF_ANTHROPIC = _names(
    "cache_control context_management inference_geo speed diagnostics fallbacks fallback_credit_token billing_policy "
    "betas"
)
_TURNS = _names(
    "model messages system tools tool_choice thinking output_config chat_template_kwargs add_special_tokens"
)
COUNT_TOKENS = _TURNS | _OF_ANTHROPIC
MESSAGES = (
    COUNT_TOKENS
    | {"stop_sequences"}
    | (_SAMPLING - _names("n stop stream_options logprobs prompt_logprobs response_format structured_outputs"))
)
REASONING = frozenset(("effort",))
TEXT = frozenset(("format",))
_POOLING = _names("model truncate_prompt_tokens truncation_side use_activation cache_salt")
CLASSIFY = _POOLING | {"input", "add_special_tokens"}
EMBEDDINGS = CLASSIFY | _names("encoding_format embed_dtype endianness dimensions")
POOLING = EMBEDDINGS | {"task"}
_FITS = _POOLING | _names("max_tokens_per_query max_tokens_per_doc")
SCORE = _FITS | _names("text_1 text_2 queries documents items data_1 data_2")
RERANK = _FITS | _names("query documents top_n return_documents")
TOKENIZE = _TEMPLATE | {"model", "prompt", "add_special_tokens", "tool_choice"}
DETOKENIZE = frozenset(("model", "tokens"))

WITHOUT_EFFECT = _names(
    "user metadata store service_tier safety_identifier prediction priority request_id session_id "
    "prompt_cache_key prompt_cache_options prompt_cache_retention stream_interval"
)


class Refusal(NamedTuple):
    """Why a field is refused. The ``neutral`` values are allowed, because they ask for nothing.

    Null is always neutral. False and empty values are, unless true is listed as neutral, or ``neutral`` is None.
    """

    reason: str
    neutral: tuple[Any, ...] | None = ()

    def allows(self, value: Any) -> bool:
        if value is None or self.neutral is None:
            return value is None
        return value in self.neutral or (True not in self.neutral and (value is False or value in ("", [], {})))


_GUIDED = Refusal("use structured_outputs, as with vLLM since 0.12")
_TRANSFER = Refusal("engines here do not exchange keys and values with vLLM's")
_MEDIA = Refusal(TEXT_ONLY)
REFUSED: dict[str, Refusal] = {
    **dict.fromkeys(OF_RELAYING_ENGINES, Refusal("the engine's own server answers")),
    "logprob_token_ids": Refusal("log-probabilities are those of the likeliest tokens; send logprobs"),
    "suffix": Refusal("insertion is not supported"),
    "use_beam_search": Refusal("beam search is not supported"),
    "length_penalty": Refusal("it belongs to beam search, which is not supported", (1,)),
    "early_stopping": Refusal("it belongs to beam search, which is not supported"),
    "messages": Refusal("only chats have them; send the text itself"),
    "functions": Refusal("use tools instead"),
    "function_call": Refusal("use tool_choice instead", ("none",)),
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "guided_decoding": _GUIDED,
    "guided_decoding_backend": _GUIDED,
    "guided_whitespace_pattern": _GUIDED,
    "chat_template": Refusal("the checkpoint's own template is used"),
    "chat_template_kwargs": Refusal("only chats have a template"),
    "prompt_embeds": Refusal("send the prompt as text or token ids"),
    "truncate_prompt_tokens": Refusal("the prompts of responses are not cut; send truncation"),
    "truncation_side": Refusal("the prompts of responses are not cut; send truncation"),
    "spaces_between_special_tokens": Refusal("special tokens are written as the tokenizer writes them", (True,)),
    "include_reasoning": Refusal("a chat's reasoning is told from its answer, a completion's is not", (True,)),
    "thinking_token_budget": Refusal("only the whole answer has a limit, with its reasoning"),
    "verbosity": Refusal("no model here has it; say it in the messages", ("medium",)),
    "modalities": Refusal("the model writes text only", (["text"],)),
    "audio": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "mm_payload": Refusal(_MEDIA.reason, ("tensors",)),
    "return_mm_kwargs": _MEDIA,
    "web_search_options": Refusal("the model cannot search"),
    "moderation": Refusal("there is no moderation model"),
    "return_token_ids": Refusal("only chats and completions have them; /tokenize gives those of a text"),
    "return_tokens_as_token_ids": Refusal("only chats and completions have them"),
    "return_token_offsets": Refusal("offsets are not part of an answer"),
    "return_token_strs": Refusal("tokens are given as ids; /detokenize gives their text"),
    "return_weight_versions": Refusal("versions of weights are not part of an answer"),
    "return_prompt_text": Refusal("only chats have it"),
    "routed_experts_prompt_start": Refusal("routed experts are not part of an answer", (0,)),
    "kv_transfer_params": _TRANSFER,
    "ec_transfer_params": _TRANSFER,
    "vllm_xargs": Refusal("engines here take no extra arguments"),
    "logits_processors": Refusal("code cannot be sent to this server"),
    "watermarking": Refusal("answers are not watermarked"),
    "repetition_detection": Refusal("repetitions do not end an answer; send repetition_penalty"),
    "normalize": Refusal("use use_activation, as with vLLM since 0.32", None),
    "add_special_tokens": Refusal("special tokens are always added to pairs", (True,)),
    "instruction": Refusal("encoders and classifiers have no place for one; write it into the texts"),
    "rank_fields": Refusal("documents are texts; join the fields of each", (["text"],)),
    "max_chunks_per_doc": Refusal("documents are read whole; send truncate_prompt_tokens or max_tokens_per_doc"),
    "padding": Refusal("texts of a batch are not padded to a length of yours", ("do_not_pad",)),
}
_STATE = Refusal("nothing is kept between requests; send all of the input with each")
_OPENAIS = Refusal("it belongs to OpenAI's own service")
REFUSED_FOR_RESPONSES = REFUSED | {
    "previous_response_id": _STATE,
    "conversation": _STATE,
    "background": Refusal(
        "nothing is kept, so that the response could not be fetched later; wait for it, or stream it"
    ),
    "background_options": Refusal("responses are not made in the background"),
    "prompt": Refusal("there are no stored prompts; send the text as input"),
    "context_management": Refusal(
        'conversations are not compacted; "truncation": "auto" leaves out their oldest turns'
    ),
    "access_programs": _OPENAIS,
    "image": _MEDIA,
    "messages": Refusal("send them as input"),
    "n": Refusal("a response has one answer; send the request again for another", (1,)),
    "max_tokens": Refusal("use max_output_tokens"),
    "max_completion_tokens": Refusal("use max_output_tokens"),
    "response_format": Refusal("use text.format"),
    "reasoning_effort": Refusal("use reasoning.effort"),
    "prompt_logprobs": Refusal("chats and completions have them"),
    "logprobs": Refusal('use include, with "message.output_text.logprobs" in it'),
    "enable_response_messages": Refusal("the prompt is not part of an answer"),
    "previous_input_messages": Refusal("send them as input"),
}
_ANTHROPICS = Refusal("it belongs to Anthropic's own service")
REFUSED_FOR_MESSAGES = REFUSED | {
    "container": _ANTHROPICS,
    "mcp_servers": Refusal("this server calls no tools itself; list them as tools"),
    "thread": Refusal("nothing is kept between requests; send all messages with each"),
    "compaction": Refusal("conversations are not compacted"),
    "output_format": Refusal("use output_config.format"),
    "n": Refusal("a message has one answer; send the request again for another", (1,)),
    "stop": Refusal("use stop_sequences"),
    "max_completion_tokens": Refusal("use max_tokens"),
    "response_format": Refusal("use output_config.format"),
    "structured_outputs": Refusal("use output_config.format"),
    "reasoning_effort": Refusal("use output_config.effort"),
    "parallel_tool_calls": Refusal("use tool_choice.disable_parallel_tool_use", (True,)),
    "logprobs": Refusal("chats, completions and responses have them"),
    "top_logprobs": Refusal("chats, completions and responses have them"),
    "prompt_logprobs": Refusal("chats and completions have them"),
}
_NO_SUMMARY = Refusal("the reasoning is shown as it is, without a summary", ("auto",))
REFUSED_REASONING = {
    "summary": _NO_SUMMARY,
    "generate_summary": _NO_SUMMARY,
    "mode": Refusal("it belongs to OpenAI's own models", ("standard",)),
    "context": Refusal("it belongs to OpenAI's own models", ("auto",)),
}
REFUSED_TEXT = {"verbosity": REFUSED["verbosity"]}
# Fields of OpenAI's interface or of old ones, which vLLM's server would silently ignore.
_TAKEN_BY_NONE = _names(
    "audio early_stopping function_call functions guided_choice guided_decoding guided_decoding_backend guided_grammar "
    "guided_json guided_regex guided_whitespace_pattern logits_processors modalities moderation verbosity "
    "web_search_options"
)
_ECHO = Refusal("a chat does not repeat its messages")  # /v1/completions has it


def check_generation_fields(
    body: Body, known: frozenset[str], refused: Mapping[str, Refusal] = REFUSED, *, can_relay: bool
) -> None:
    """Check the fields of a request for text like ``check_fields``. With ``can_relay``, some are for the engine."""
    check_fields(body, known - OF_RELAYING_ENGINES if can_relay else known, refused)


def check_fields(body: Body, known: frozenset[str], refused: Mapping[str, Refusal] = REFUSED) -> None:
    """Raise ApiError 400 for the first field that would change the answer and is not among the ``known`` ones.

    It is an UnsupportedRequestError if an engine's own server may know the field, and ignores no other one.
    """
    unsupported = None
    for name, value in body.items():
        if name in known or name in WITHOUT_EFFECT:
            continue
        refusal = _ECHO if name == "echo" and "messages" in known else refused.get(name)
        if refusal is None:
            raise _unknown(name, known)
        if not refusal.allows(value):
            kind = ApiError if name in _TAKEN_BY_NONE else UnsupportedRequestError
            error = kind(400, f"{name}: {refusal.reason}", param=name, code="unsupported_parameter")
            if kind is ApiError:
                raise error
            unsupported = unsupported or error
    if unsupported is not None:
        raise unsupported


def check_inner_fields(
    found: Body, parent: str, known: frozenset[str], refused: Mapping[str, Refusal] | None = None
) -> None:
    """Raise ApiError 400 for a field of an object inside the body that is none of the ``known`` ones.

    One of the ``refused`` ones may have a value that asks for nothing. Else it is an UnsupportedRequestError.
    """
    for name, value in found.items():
        if name in known:
            continue
        refusal = (refused or {}).get(name)
        if refusal is None:
            raise _unknown(name, known, f"{parent}.")
        if not refusal.allows(value):
            param = f"{parent}.{name}"
            raise UnsupportedRequestError(400, f"{param}: {refusal.reason}", param=param, code="unsupported_value")


def inner_object(
    body: Body, name: str, known: frozenset[str], refused: Mapping[str, Refusal] | None = None
) -> Body | None:
    """Return an object inside the body, which has only ``known`` fields, or None. Raises ApiError 400 for others."""
    found = body.get(name)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise invalid(name, "an object", found)
    check_inner_fields(found, name, known, refused)
    return found


def _unknown(name: str, known: frozenset[str], prefix: str = "") -> ApiError:
    from difflib import get_close_matches  # 5 ms, and only an error needs it

    close = get_close_matches(name.lower(), sorted(known), n=1)
    meant = f"; did you mean {prefix}{close[0]}?" if close else ""
    param = printable(prefix + name)
    return ApiError(
        400, f"unknown parameter: {json_excerpt(prefix + name)}{meant}", param=param, code="unknown_parameter"
    )
