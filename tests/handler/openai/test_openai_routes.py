"""The OpenAI routes, as the openai client and plain HTTP see them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from flask import Blueprint, Flask
from medusa_handler.faults import ApiError
from medusa_handler.openai import routes

Serve = Callable[..., Any]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["words"]
    assert client.models.retrieve("words").id == "words"
    with pytest.raises(openai.NotFoundError, match='"words"'):
        client.models.retrieve("other/model")


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="words", prompt="a b c", max_tokens=4)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "w0 w1 w2 w3"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)


def test_a_streamed_completion_says_the_same(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="words", prompt="a b", max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "w0 w1 w2 w3"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


def test_what_a_request_leaves_out_is_the_checkpoints(serve: Serve) -> None:
    """As in vLLM, max_new_tokens holds for chats and responses. A completion has 16 tokens all the same."""
    generation = {"temperature": 0.5, "top_p": 0.25, "max_new_tokens": 3, "top_k": None, "do_sample": True}
    served = serve(files={"chat_template.jinja": TEMPLATE, "generation_config.json": json.dumps(generation)})
    asked = {"messages": [{"role": "user", "content": "a"}]}
    for more, words in (({}, 3), ({"max_tokens": None}, 3), ({"max_completion_tokens": 5}, 5)):
        answer = served.request("POST", "/v1/chat/completions", asked | more)[1]
        assert answer["usage"]["completion_tokens"] == words
    assert served.request("POST", "/v1/completions", {"prompt": "a"})[1]["usage"]["completion_tokens"] == 16
    answer = served.request("POST", "/v1/responses", {"input": "a", "top_p": 0.75})[1]
    assert (answer["temperature"], answer["top_p"], answer["usage"]["output_tokens"]) == (0.5, 0.75, 3)


def test_many_prompts_in_every_form(client: openai.OpenAI, served: Any) -> None:
    served.prompts()
    answer = client.completions.create(model="words", prompt=["a", "b c"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    client.completions.create(model="words", prompt=[[1, 2], [3]], max_tokens=1)
    client.completions.create(model="words", prompt=[4, 5], max_tokens=1)
    assert sorted(served.prompts()) == sorted(["'a'", "'a'", "'b c'", "'b c'", "(1, 2)", "(3,)", "(4, 5)"])


def test_a_stream_of_many_choices_names_each(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    for chunk in client.completions.create(model="words", prompt="a", n=3, max_tokens=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["w0 w1 w2"] * 3


def test_best_of_returns_n(client: openai.OpenAI, served: Any) -> None:
    served.prompts()
    answer = client.completions.create(model="words", prompt="a", n=1, best_of=3, max_tokens=2)
    assert len(answer.choices) == 1
    assert answer.choices[0].logprobs is None
    assert len(served.prompts()) == 3


def test_echo_puts_the_prompt_in_front(client: openai.OpenAI) -> None:
    assert client.completions.create(model="words", prompt="ab ", echo=True, max_tokens=1).choices[0].text == "ab w0"
    assert client.completions.create(model="words", prompt=[7], echo=True, max_tokens=1).choices[0].text == "t7w0"
    chunks = client.completions.create(model="words", prompt="ab ", echo=True, max_tokens=1, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab w0"


def test_stop_is_told(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="words", prompt="a", stop=["w2"], max_tokens=9).choices[0]
    assert (choice.text, choice.finish_reason) == ("w0 w1", "stop")
    chats = client.chat.completions.create(
        model="words", messages=[{"role": "user", "content": "a"}], stop=["w2"], stream=True
    )
    assert [getattr(chunk.choices[0], "stop_reason", None) for chunk in chats][-1] == "w2"


def test_logprobs_in_both_shapes(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="words", prompt="a", logprobs=2, max_tokens=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["w0", " w1"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.text_offset == [0, 2]
    assert logprobs.top_logprobs == [
        {"alt0": -1.0, "alt1": -2.0, "w0": -0.5},
        {"alt0": -1.0, "alt1": -2.0, " w1": -0.5},
    ]
    chat = client.chat.completions.create(
        model="words", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=1, max_tokens=1
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert (content[0].token, content[0].logprob, content[0].bytes) == ("w0", -0.5, [119, 48])
    assert [top.token for top in content[0].top_logprobs] == ["alt0"]


def test_a_chat_is_rendered_by_the_template(client: openai.OpenAI, served: Any) -> None:
    served.prompts()
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]}]
    answer = client.chat.completions.create(model="words", messages=parts, max_completion_tokens=3)
    assert answer.choices[0].message.content == "w0 w1 w2"
    assert answer.choices[0].message.role == "assistant"
    assert served.prompts() == [repr("<user>hi\nyou<assistant>")]


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="words", messages=[{"role": "user", "content": "a"}], max_tokens=3, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in chunks]
    assert None not in texts  # as with vLLM, so that they can be joined as they are
    assert "".join(map(str, texts)) == "w0 w1 w2"
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": {"1": 1}}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * ((1 << 20) + 1)}, "allowed_token_ids"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [1]}, "bad_words"),
        ({"bad_words": ["x"] * 200_000}, "bad_words"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"min_tokens": 50}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"suffix": "x"}, "suffix"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_a_bad_value_is_named(served: Any, body: dict[str, Any], param: str) -> None:
    status, answer, _ = served.complete(**body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert param in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: expected text or a list of parts, found nothing"),
        ({"messages": [None]}, "messages[0]: expected an object with a role, found nothing"),
        ({"messages": [{"role": "user", "content": "x"}], "documents": [1]}, "documents: expected a list of objects"),
        ({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": 1}, "reasoning_effort: expected text"),
        ({"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo"),
        ({"messages": [{"role": "user", "content": "x"}], "modalities": ["text", "audio"]}, "modalities"),
        (
            {"messages": [{"role": "user", "content": "x"}], "max_completion_token": 1},
            "did you mean max_completion_tokens?",
        ),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "add_generation_prompt: expected false with continue_final_message, found true",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "--engine vllm",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 3}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": 3}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "logprobs"),
    ],
)
def test_a_bad_chat_is_refused(served: Any, body: dict[str, Any], text: str) -> None:
    status, answer, _ = served.request("POST", "/v1/chat/completions", body)
    assert status == 400
    assert text in answer["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_decoding", {"regex": "a"}),
        ("use_beam_search", True),
        ("length_penalty", 2),
        ("return_token_offsets", True),
        ("spaces_between_special_tokens", False),
        ("functions", [{}]),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(served: Any, field: str, value: Any) -> None:
    status, answer, _ = served.complete(**{field: value})
    assert status == 400
    assert answer["error"]["param"] == field
    assert answer["error"]["code"] == "unsupported_parameter"


def test_fields_that_change_nothing_are_taken(served: Any) -> None:
    idle = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "cache_salt": "x",
        "priority": 3,
    }
    neutral = {
        "bad_words": [],
        "prompt_logprobs": None,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "suffix": None,
    }
    status, answer, _ = served.complete(**idle, **neutral, spaces_between_special_tokens=True)
    assert status == 200, answer
    chat = {"messages": [{"role": "user", "content": "x"}], "modalities": ["text"], "parallel_tool_calls": True}
    assert served.request("POST", "/v1/chat/completions", chat | {"verbosity": "medium", "echo": False})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "meant"),
    [
        ("/v1/completions", {"prompt": "a", "max_token": 3}, "max_token", "max_tokens"),
        ("/v1/completions", {"prompt": "a", "Temperature": 0}, "Temperature", "temperature"),
        ("/", {"prompt": "a", "stream_options": {"include_use": 1}}, "stream_options.include_use", "include_usage"),
        ("/v1/completions", {"prompt": "a", "mesages": 3}, "mesages", ""),
        ("/v1/completions", {"prompt": "a", "\ud800": 3}, "\\ud800", ""),
        ("/v1/embeddings", {"input": "a", "dimension": 3}, "dimension", "dimensions"),
        ("/tokenize", {"prompt": "a", "add_special_token": False}, "add_special_token", "add_special_tokens"),
        ("/detokenize", {"token": [1]}, "token", "tokens"),
        ("/", {"promt": "a"}, "promt", "prompt"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_answered_with_the_one_that_was_meant(
    served: Any, path: str, body: dict[str, Any], param: str, meant: str
) -> None:
    status, answer, _ = served.request("POST", path, body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["code"] == "unknown_parameter"
    assert ("did you mean" in answer["error"]["message"]) is bool(meant)
    assert meant in answer["error"]["message"]


def test_values_are_shown_as_they_were_sent(served: Any) -> None:
    for body, shown in (
        ({"prompt": None}, "found nothing"),
        ({"prompt": "a", "temperature": True}, "found true"),
        ({"prompt": "a", "stop": [None]}, "found [null]"),
        ({"prompt": {"a": "b"}}, 'found {"a": "b"}'),
        ({"prompt": "a", "max_tokens": "many"}, 'found "many"'),
        ({"prompt": "a", "max_tokens": "\ud800"}, 'found "\\ud800"'),
    ):
        message = served.request("POST", "/v1/completions", body)[1]["error"]["message"]
        assert shown in message
    for sent, shown in (
        (b"[1]", "found an array"),
        (b"null", "found null"),
        (b'{"\xff": 1}', "not UTF-8"),
        (b'{"a"', "line 1, column 5"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "found a number of more than 4300 digits"),
    ):
        assert shown in served.request("POST", "/v1/completions", sent)[1]["error"]["message"], sent


def test_numbers_beyond_a_float_are_refused(served: Any) -> None:
    for body, param in (
        ({"prompt": "a", "temperature": 10**400}, "temperature"),
        ({"prompt": "a", "logit_bias": {"1": -(10**400)}}, "logit_bias"),
    ):
        status, answer, _ = served.request("POST", "/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, param)


def test_lone_surrogates_are_answered(served: Any) -> None:
    body = {"prompt": "a\ud800", "echo": True, "max_tokens": 1}
    for path in ("/", "/v1/completions"):
        status, answer, _ = served.request("POST", path, body)
        assert (status, answer["choices"][0]["text"]) == (200, "a?w0")
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    chosen = {"tool_choice": {"type": "function", "function": {"name": "\ud800"}}}
    chat = {"messages": [{"role": "user", "content": "x"}]} | tools | chosen
    status, answer, _ = served.request("POST", "/v1/chat/completions", chat)
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 14), reason="it can write what it can read")
def test_a_tools_schema_that_is_nested_too_deeply_is_refused(served: Any) -> None:
    depth = 900 if sys.version_info < (3, 12) else 50_000
    schema = '{"a":' * depth + "1" + "}" * depth
    body = (
        '{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required", "tools": '
        '[{"type": "function", "function": {"name": "f", "parameters": ' + schema + "}}]}"
    )
    status, answer, _ = served.request("POST", "/v1/chat/completions", body.encode())
    assert (status, answer["error"]["param"]) == (400, "tools")


def test_what_the_engine_refuses_names_the_field_and_openais_code(served: Any) -> None:
    long = "a " * 200
    for path, body, param in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/completions", {"prompt": long, "stream": True}, "prompt"),
    ):
        status, answer, _ = served.request("POST", path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 100 tokens" in answer["error"]["message"]


def test_every_field_of_the_openai_client_is_known() -> None:
    import inspect

    from medusa_handler.openai.body.fields import CHAT, COMPLETION, EMBEDDINGS, REFUSED, WITHOUT_EFFECT
    from openai.resources import Completions, Embeddings
    from openai.resources.chat import Completions as Chat

    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for kind, known in ((Completions, COMPLETION), (Chat, CHAT), (Embeddings, EMBEDDINGS)):
        fields = set(inspect.signature(kind.create).parameters) - own
        assert not fields - known - WITHOUT_EFFECT - set(REFUSED), kind


def test_a_model_without_template_says_so(serve: Serve) -> None:
    status, answer, _ = serve().request(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
    )
    assert status == 400
    assert "chat template" in answer["error"]["message"]


def test_errors_have_openai_shape(served: Any) -> None:
    for method, path, body, expected in (
        ("POST", "/v1/completions", b"{nope", 400),
        ("POST", "/v1/completions", b"[1]", 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "user": Infinity}', 400),  # a field without effect
        ("GET", "/v1/completions", None, 405),
        ("GET", "/v1/nothing", None, 404),
        ("POST", "/v1/completions", b'{"prompt": "' + b"a " * 200 + b'"}', 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "model": "gpt-4"}', 404),
    ):
        status, answer, _ = served.request(method, path, body)
        assert status == expected, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in str(answer)


def test_a_route_that_was_probably_meant_is_named(served: Any) -> None:
    for path in ("/chat/completions", "/v1/chat/completion"):
        status, answer, _ = served.request("POST", path, {"messages": []})
        assert (status, answer["error"]["message"].split("; ")[1]) == (404, "did you mean /v1/chat/completions?")
    message = served.request("POST", "/elsewhere", {})[1]["error"]["message"]
    assert message == "there is no route POST /elsewhere; GET /openapi.json lists those that there are"


def test_the_root_is_a_completion(served: Any) -> None:
    assert served.request("POST", "/", {"prompt": "a", "max_tokens": 2})[1]["choices"][0]["text"] == "w0 w1"
    status, answer, _ = served.request("POST", "/", b"tell me", {"Content-Type": "text/plain"})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 16
    chat = served.request("POST", "/", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    assert chat[1]["object"] == "chat.completion"


def test_the_root_reaches_a_classifier(serve: Serve) -> None:
    served = serve(architecture="classifier")
    status, answer, _ = served.request("POST", "/", {"input": ["a b", "c"]})
    assert (status, [one["probs"] for one in answer["data"]]) == (200, [[0.25, 0.75]] * 2)
    status, answer, _ = served.request("POST", "/", {"query": "a", "documents": ["b"]})
    assert (status, "one with 2" in answer["error"]["message"]) == (400, True)  # it is the route of rankings
    assert "embedding" in serve(architecture="encoder").request("POST", "/", {"input": "a"})[1]["data"][0]


def test_every_route_for_clients_is_described(served: Any) -> None:
    paths = served.request("GET", "/openapi.json")[1]["paths"]
    assert {"/", "/v1/models", "/v1/models/{name}", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"} <= set(paths)
    assert [one["name"] for one in paths["/v1/models/{name}"]["parameters"]] == ["name"]


def test_an_adapter_that_another_request_has_just_unloaded_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "just-unloaded"
    service = SimpleNamespace(engine=None, model=SimpleNamespace(name="base", adapters={name}))
    monkeypatch.setattr(routes, "adapter_models", lambda _: [])
    monkeypatch.setattr(routes, "check_model", lambda *_: name)
    app = Flask("test")
    blueprint = Blueprint("openai", __name__)
    routes._add_models(blueprint, service)  # type: ignore[arg-type]
    app.register_blueprint(blueprint)
    app.testing = True
    with pytest.raises(ApiError, match="just-unloaded") as caught:
        app.test_client().get(f"/v1/models/{name}")
    assert caught.value.status == 404


def test_adapters_are_not_changed_by_requests_unless_the_operator_allows_it(served: Any) -> None:
    for what, body, param in (
        ("load", {"lora_name": "a", "lora_path": "https://models.example/a"}, "lora_path"),
        ("unload", {"lora_name": "a"}, "lora_name"),
    ):
        status, answer, _ = served.request("POST", f"/v1/{what}_lora_adapter", body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (403, param, "not_allowed")


def test_another_method_is_refused_with_those_that_work(served: Any) -> None:
    status, answer, headers = served.request("GET", "/v1/completions")
    assert (status, answer["error"]["message"]) == (405, "/v1/completions takes POST, not GET")
    assert "POST" in headers["allow"].split(", ")
    assert served.request("PUT", "/v1/models", b"")[1]["error"]["message"] == "/v1/models takes GET, not PUT"


def test_tokenize_and_back(served: Any) -> None:
    _, answer, _ = served.request("POST", "/tokenize", {"prompt": "ab c"})
    assert answer["tokens"] == [1, 2, 1]
    assert answer["count"] == 3
    assert served.request("POST", "/detokenize", {"tokens": [5, 6]})[1] == {"prompt": "t5 t6"}


def test_the_log_stays_quiet(serve: Serve) -> None:
    served = serve()
    assert served.complete()[0] == 200
    served.until(lambda: served.metric("medusa_requests_in_flight") == 0)  # it may end after the client has its answer
    assert served.stop() == 0
    assert served.output() == ""
