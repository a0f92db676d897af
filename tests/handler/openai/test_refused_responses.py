"""What /v1/responses refuses: each with one 400 that names the field or item at fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]
TEMPLATE = "{# tools: <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}<assistant>"
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def raw(served: Any, body: str) -> tuple[int, bytes]:
    with contextlib.closing(served.connect()) as connection:
        connection.request("POST", "/v1/responses", body.encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"input": None}, "input", "found nothing"),
        ({"input": ""}, "input", "not empty"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [3]}, "input[0]", "an object"),
        ({"input": [{"content": "x"}]}, "input[0].type", "message, reasoning, function_call or function_call_output"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", 'found "computer_call"'),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "as content"),
        ({"input": [{"type": "reasoning", "content": "x", "text": "x"}]}, "input[0].text", "unknown parameter"),
        ({"input": [{"type": "reasoning", "content": [{"type": "output_text", "text": "x"}]}]},
         "input[0].content[0].type", "reasoning_text or summary_text"),
        ({"include_reasoning": "no"}, "include_reasoning", "true or false"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "send the item itself"),
        ({"input": [{"type": ["message"]}]}, "input[0].type", "found"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "user, assistant, system, developer"),
        ({"input": [{"role": "user"}]}, "input[0].content", "text or a list of parts"),
        ({"input": [{"role": "user", "content": "x", "nme": 1}]}, "input[0].nme", "unknown parameter"),
        ({"input": [{"role": "user", "content": [3]}]}, "input[0].content[0].type", "input_text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type", "--engine vllm",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            "input[0].content[0].type", "input_text",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "text"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "", "arguments": ""}]},
            "input[0].name", "letters",
        ),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments", "text"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
            "input[0].call_id", "nothing is kept from earlier responses",
        ),
        ({"instructions": 3}, "instructions", "text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"max_output_token": 3}, "max_output_token", "did you mean max_output_tokens?"),
        ({"n": 2}, "n", "one answer"),
        ({"messages": [{}]}, "messages", "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept"),
        ({"conversation": "conv_1"}, "conversation", "nothing is kept"),
        ({"background": True}, "background", "nothing is kept"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "input"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "truncation"),
        ({"truncation": "middle"}, "truncation", "auto or disabled"),
        ({"include": ["everything"]}, "include[0]", "message.output_text.logprobs"),
        ({"include": "x"}, "include", "a list"),
        ({"include": [{}]}, "include[0]", "message.output_text.logprobs"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "20"),
        ({"metadata": {"a": 1}}, "metadata", "texts"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "512"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "x")}, "metadata", "16"),
        ({"user": 3}, "user", "text"),
        ({"store": 3}, "store", "true or false"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "unknown"),
        ({"stream_options": 3}, "stream_options", "an object"),
        ({"reasoning": "low"}, "reasoning", "an object"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "text"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "summary"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort", "did you mean reasoning.effort?"),
        ({"text": "json"}, "text", "an object"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "say it in the messages"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "a JSON schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", "unknown"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs", "text.format",
        ),
        ({"tools": 3}, "tools", "a list"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "the only type of tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "unknown"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
        ({"tools": [WEATHER | {"parameters": []}]}, "tools[0].parameters", "a JSON schema"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading", "at once"),
        ({"tool_choice": "required"}, "tool_choice", "tools with it"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [WEATHER]}, "tool_choice", "one of the tools"),
        ({"tool_choice": {"type": "file_search"}, "tools": [WEATHER]}, "tool_choice", "allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}, "tools": [WEATHER]}, "tool_choice.tools", "a list"),
        (
            {
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
                "tools": [WEATHER],
            },
            "tool_choice.tools[0]", "one of the tools",
        ),
        (
            {"tool_choice": "required", "tools": [WEATHER], "text": {"format": {"type": "json_object"}}},
            "text.format", "forces",
        ),
        ({"temperature": -1}, "temperature", "from 0 to 2"),
        ({"model": "gpt-9"}, "model", "does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_and_named(served: Any, body: dict[str, Any], param: str, text: str) -> None:
    status, answer, _ = served.request("POST", "/v1/responses", {"input": "x"} | body)
    assert status == (404 if param == "model" else 400)
    assert answer["error"]["param"] == param
    assert text in answer["error"]["message"]
    assert "'" not in answer["error"]["message"].replace("OpenAI's", "")  # nothing in Python's own form


def test_a_body_that_is_nested_deeply_is_answered_or_refused(served: Any) -> None:
    for depth in (100, 500, *range(900, 1000, 7), 5000):
        deep = '{"a":' * depth + "1" + "}" * depth
        for field, value in (
            ("tools", f'[{{"type": "function", "name": "f", "parameters": {deep}}}]'),
            ("input", deep),
        ):
            body = f'{{"input": "say:x", "{field}": {value}}}'
            status, answer = raw(served, body)
            assert status in (200, 400), answer
            if status == 200:
                assert b"event: response.completed" in raw(served, body[:-1] + ', "stream": true}')[1]
