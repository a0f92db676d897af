"""Chat templates: where they are found, what they may use, and that they render as transformers renders them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_handler.faults import ApiError
from medusa_handler.model.chat_template import ChatTemplate
from medusa_handler.openai.chat import template_arguments
from process_tree import alive, descendants

MESSAGES = [
    {"role": "system", "content": "Be <short> & kind."},
    {"role": "user", "content": "  Wie geht's? "},
    {"role": "assistant", "content": "Gut."},
    {"role": "user", "content": "Schön"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "a": "ä<b>"}}}]

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA = """{{ bos_token }}{% for message in messages %}
{% if loop.index0 == 0 and message['role'] == 'system' %}
{% continue %}
{% endif %}
{% if message.role == 'user' %}
[INST] {{ message['content'] }} [/INST]
{% else %}
{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}
{%- set ns = namespace(found=false) %}
{%- for tool in tools or [] %}{% set ns.found = true %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}{% endfor %}
{{- ns.found }}"""


def template(files: dict[str, Any]) -> ChatTemplate:
    data = {name: text if isinstance(text, str) else json.dumps(text) for name, text in files.items()}
    return ChatTemplate(lambda name: data[name].encode() if name in data else None)


@pytest.mark.parametrize("source", [CHATML, LLAMA])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_it_renders_as_transformers_does(source: str, tools: Any, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=source, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
    )
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": source}
    found = template({"tokenizer_config.json": config}).render(
        MESSAGES, {"tools": tools, "add_generation_prompt": prompt}
    )
    assert found == expected[0]


def test_where_a_template_is_found() -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert (
        template({"chat_template.jinja": "A", "chat_template.json": {"chat_template": "B"}}).render(MESSAGES, {}) == "A"
    )
    assert template({"chat_template.json": {"chat_template": "B"}}).render(MESSAGES, {}) == "B"
    both = template({"tokenizer_config.json": {"chat_template": named}})
    assert both.render(MESSAGES, {}) == "D"
    assert both.render(MESSAGES, {"tools": TOOLS}) == "T"
    special = {"special_tokens_map.json": {"bos_token": "<b>"}, "chat_template.jinja": "{{ bos_token }}"}
    assert template(special).render(MESSAGES, {}) == "<b>"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "template"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
    ],
)
def test_a_template_that_refuses(source: str, text: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        template({"chat_template.jinja": source}).render(MESSAGES, {})
    assert caught.value.status == 400


def test_without_a_template() -> None:
    with pytest.raises(ApiError, match=r"chat_template\.jinja"):
        template({"tokenizer_config.json": {}}).render(MESSAGES, {})
    with pytest.raises(ApiError, match="not JSON"):
        template({"tokenizer_config.json": "{"})


def test_arguments_of_calls_are_objects_to_the_template() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert template({"chat_template.jinja": source}).render([message], {}) == "5"


def test_a_last_message_is_continued() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Also: "}]
    found = template({"chat_template.jinja": CHATML}).render(messages, {"continue_final_message": True})
    assert found.endswith("<|im_start|>assistant\nAlso:")


def test_arguments_of_a_call_that_are_too_many_to_be_parsed_stay_text() -> None:
    arguments = "[" + "[]," * 200_000 + "[]]"
    calls = [{"function": {"name": "a", "arguments": arguments}}]
    found = template({"chat_template.jinja": "{{ messages[0].tool_calls[0].function.arguments }}"})
    assert found.render([{"role": "assistant", "content": "", "tool_calls": calls}], {}) == arguments


@pytest.mark.parametrize(
    "function",
    [{"arguments": text} for text in ("", '{"x', "no JSON", "[5]", "[" * 100_000, None, 5, {})] + [{}],
    ids=lambda function: str(function)[:30],
)
def test_arguments_of_a_call_that_are_no_object_become_an_empty_one(function: dict[str, Any]) -> None:
    source = "{% for key, value in messages[0].tool_calls[0].function.arguments.items() %}{{ key }}{% endfor %}."
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a", **function}}]}
    assert template({"chat_template.jinja": source}).render([message], {}) == "."


def test_arguments_of_many_calls_are_not_all_parsed() -> None:
    text = "{% for c in messages[0].tool_calls %}{{ c.function.arguments is string }} {% endfor %}"
    template = ChatTemplate(lambda name: text.encode() if name == "chat_template.jinja" else None)
    calls = [{"function": {"name": "a", "arguments": "[" + "[]," * 40_000 + "[]]"}} for _ in range(4)]
    found = template.render([{"role": "assistant", "content": "", "tool_calls": calls}], {})
    assert found.split() == ["False", "False", "True", "True"]


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("chat_template.jinja", b"\xff{{ messages }}", "chat_template.jinja is not UTF-8"),
        (
            "chat_template.json",
            b'{"chat_template": [{"name": "default"}]}',
            "no list of objects with name and template",
        ),
        ("tokenizer_config.json", b'{"chat_template": [7]}', "no list of objects with name and template"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[]", "wrong content: expected an object, found an array"),
    ],
)
def test_a_broken_file_of_the_checkpoint_is_named(name: str, data: bytes, text: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        ChatTemplate({name: data}.get)
    assert (caught.value.status, caught.value.code) == (500, "bad_checkpoint")


def test_a_special_token_without_text_is_empty() -> None:
    files = {"tokenizer_config.json": b'{"bos_token": {}, "chat_template": "<{{ bos_token }}>"}'}
    assert ChatTemplate(files.get).render(MESSAGES, {}) == "<>"


def test_a_developers_message_is_the_systems_unless_the_template_knows_the_role() -> None:
    source = (
        "{% for m in messages %}{% if m.role in ('system', 'user'ROLES) %}<{{ m.role }}>{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    asked = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    for roles, expected in (("", "<system>Be short.<user>Hi"), (", 'developer'", "<developer>Be short.<user>Hi")):
        found = template({"chat_template.jinja": source.replace("ROLES", roles)}).render(asked, {})
        assert found == expected


def test_an_effort_reaches_the_template_also_as_a_switch() -> None:
    for body, expected in (
        ({}, " "),
        ({"reasoning_effort": "low"}, "low True"),
        ({"reasoning_effort": "none"}, "none False"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low False"),
    ):
        found = template({"chat_template.jinja": "{{ reasoning_effort }} {{ enable_thinking }}"})
        assert found.render(MESSAGES, template_arguments(body)) == expected


HOSTILE = (
    "{{ messages[0].content }}{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)


def test_a_template_that_takes_too_long_or_is_killed_costs_its_own_request(serve: Callable[..., Any]) -> None:
    served = serve(files={"chat_template.jinja": HOSTILE})
    served.wait_ready()

    def chat(content: str) -> tuple[int, Any]:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        status, answer, _ = served.request("POST", "/v1/chat/completions", body)
        return status, answer

    def process() -> int:
        (pid,) = (pid for pid, name in descendants(served.process.pid).items() if name == "templates")
        return pid

    forked = process()  # before the first chat
    assert {each.name for each in Path(f"/proc/{forked}/fd").iterdir()} == {"0", "1", "2"}
    assert chat("Hi")[0] == 200
    assert process() == forked
    status, answer = chat("loop")
    assert (status, answer["error"]["code"]) == (400, "bad_messages")
    expected = "the model's chat template 'default' took more than 3 s of CPU time; send less, or put a chat_template"
    assert answer["error"]["message"].startswith(expected)
    assert chat("Hi")[0] == 200
    os.kill(killed := process(), signal.SIGKILL)
    served.until(lambda: not alive(killed))
    assert chat("Hi")[0] == 200


def test_a_rendering_ends_when_its_client_leaves(serve: Callable[..., Any]) -> None:
    served = serve(files={"chat_template.jinja": HOSTILE})
    served.wait_ready()
    body = {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 2}
    with contextlib.closing(served.connect()) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        served.until(lambda: served.metric("medusa_requests_in_flight") == 1)
    served.until(lambda: served.metric("medusa_requests_in_flight") == 0)
    ended = [line for line in served.request("GET", "/metrics")[1].decode().splitlines() if 'status="499"' in line]
    assert len(ended) == 1, "it ended neither for its length nor with an answer"


def test_a_prompt_that_is_certainly_too_long_is_refused_before_it_comes_back(serve: Callable[..., Any]) -> None:
    served = serve(files={"chat_template.jinja": "{{ messages[0].content * 1000 }}"})
    served.wait_ready()
    body = {"messages": [{"role": "user", "content": "a" * 1049}], "max_tokens": 2}
    status, answer, _ = served.request("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "messages")
    assert "makes a text of more than 1048576 characters from these messages" in answer["error"]["message"]


def test_a_text_that_is_certainly_too_long_does_not_reach_the_engine(serve: Callable[..., Any]) -> None:
    served = serve()
    served.wait_ready()
    served.complete()
    served.prompts()
    status, answer, _ = served.complete(prompt="a" * ((1 << 20) + 1))
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert served.prompts() == []
    assert served.complete(prompt="a " * (1 << 19))[0] == 400
    assert len(served.prompts()) == 1
