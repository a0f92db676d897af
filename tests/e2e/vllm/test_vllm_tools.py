"""Tool calls and structural tags through vLLM's own routes, with the flags that vLLM's documentation names."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FUNCTION = {"name": "f", "parameters": SCHEMA, "strict": True}
MESSAGES = [{"role": "user", "content": "?"}]
TAG = {
    "type": "tag",
    "begin": "<n>",
    "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
    "end": "</n>",
}
EXPECTED = ({"n": 1}, {"n": 2})


@pytest.fixture(scope="module")
def serving(start_shared: Callable[..., Any], example: Path) -> Any:
    flags = ("--", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    return start_shared(
        "--model", example, "--served-model-name", "m", "--engine", "vllm", "--kv-cache-mb", "64", *flags
    )


def ask(serving: Any, path: str, **body: Any) -> tuple[int, Any]:
    status, answer, _ = serving.request("POST", path, body, timeout_s=PATIENCE_S)
    return status, answer


def ask_for_call(serving: Any, path: str, calls: Callable[[Any], list[Any]], **body: Any) -> list[Any]:
    """Ask until there are calls: a model this small often writes white space between a call's tokens until it ends."""
    for _ in range(30):
        status, answer = ask(serving, path, **body)
        assert status == 200, answer
        if found := calls(answer):
            return found
    raise AssertionError(answer)


def chat_calls(answer: Any) -> list[Any]:
    message = answer["choices"][0]["message"]
    return [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_forced_calls_are_made(serving: Any, choice: Any) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 80}
    (found,) = ask_for_call(serving, "/v1/chat/completions", chat_calls, **body)
    assert found in EXPECTED


def test_forced_calls_are_streamed(serving: Any) -> None:
    url = f"http://127.0.0.1:{serving.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0) as client:
        asked: Any = {"model": "m", "messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}],
                      "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}  # fmt: skip
        for _ in range(30):
            arguments, names, reason = "", [], None
            for chunk in client.chat.completions.create(**asked, stream=True):
                for call in chunk.choices[0].delta.tool_calls or ():
                    assert call.function is not None
                    names += [call.function.name] if call.function.name else []
                    arguments += call.function.arguments or ""
                reason = chunk.choices[0].finish_reason or reason
            if reason != "length":
                break
    assert (names, reason) == (["f"], "tool_calls")
    assert json.loads(arguments) in EXPECTED


def test_strict_tools_beside_free_text_and_a_form(serving: Any) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    free = {"messages": MESSAGES, "tools": tools, "temperature": 0, "max_tokens": 20}
    status, answer = ask(serving, "/v1/chat/completions", **free, tool_choice="auto")
    assert (status, answer["choices"][0]["message"].get("tool_calls") or []) == (200, [])
    assert answer["choices"][0]["message"]["content"]
    status, answer = ask(serving, "/v1/chat/completions", **free, structured_outputs={"choice": ["yes", "no"]})
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"].startswith(("yes", "no", "<tool_call>"))
    lark = {"structured_outputs": {"grammar": 'start: "yes" | "no"'}}
    status, answer = ask(serving, "/v1/chat/completions", **free, **lark)
    assert (status, answer["choices"][0]["message"]["content"] in ("yes", "no")) == (200, True)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_responses_make_forced_calls(serving: Any, choice: Any) -> None:
    def calls(answer: Any) -> list[Any]:
        return [json.loads(each["arguments"]) for each in answer["output"] if each["type"] == "function_call"]

    tools = [{"type": "function", **FUNCTION}]
    body = {"input": "?", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 80}
    (found,) = ask_for_call(serving, "/v1/responses", calls, **body)
    assert found in EXPECTED


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_messages_make_forced_calls(serving: Any, choice: dict[str, Any]) -> None:
    def calls(answer: Any) -> list[Any]:
        return [each["input"] for each in answer["content"] if each["type"] == "tool_use"]

    tools = [{"name": "f", "input_schema": SCHEMA, "strict": True}]
    body = {"model": "m", "messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": 80}
    assert ask_for_call(serving, "/v1/messages", calls, **body)[0] in EXPECTED


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "structural_tag", "format": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})}},
    ],
)
def test_callers_may_send_structural_tags(serving: Any, form: dict[str, Any]) -> None:
    status, answer = ask(serving, "/v1/completions", prompt="x", max_tokens=20, **form)
    assert status == 200, answer
    assert answer["choices"][0]["text"] in ("<n>1</n>", "<n>2</n>")


def test_structural_tags_are_tried_within_limits(serving: Any) -> None:
    """A schema of 47 KB takes xgrammar 47 s and 2 GB, in the thread that answers every request."""
    properties = {f"p{number}": {"type": "integer"} for number in range(1600)}
    counted = {"type": "object", "properties": properties, "minProperties": 800, "maxProperties": 1200}
    repeated = {"$defs": {"d": {"enum": ["x" * 300_000]}}, "properties": properties}
    for style, schema in (("json", counted), ("qwen_xml", repeated)):
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "style": style, "json_schema": schema}}
        began = time.monotonic()
        status, answer = ask(serving, "/v1/completions", prompt="x", max_tokens=2, response_format=tag)
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert time.monotonic() - began < 20
    status, answer = ask(serving, "/v1/completions", prompt="x", max_tokens=2)
    assert status == 200, answer
