"""Reasoning and answers of a model that always thinks the same, through the real engine and the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from thinking_model import SAID, THOUGHT, write_thinker

pytest.importorskip("llguidance", reason="structured outputs need llguidance")
pytestmark = pytest.mark.forked

OPEN = {"chat_template_kwargs": {"thinking": True}}
CLOSED = {"chat_template_kwargs": {"thinking": False}}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "greet", "parameters": PERSON}}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def client(start_shared: Callable[..., Any], thinker: Path) -> Iterator[openai.OpenAI]:
    serving = start_shared("--model", thinker, "--served-model-name", "thinker", "--kv-cache-mb", "16")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, *, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    options = {"max_tokens": 100, "temperature": 0, "messages": [{"role": "user", "content": "2+2"}], **options}
    return client.chat.completions.create(model="thinker", extra_body=extra, **options)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, str, str | None]:
    reasoning, content, reason = "", "", None
    for chunk in ask(client, stream=True, **options):
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
    return reasoning, content, reason


@pytest.mark.parametrize(
    ("options", "reasoning", "content", "reason"),
    [
        ({}, "I add two.", "Four", "stop"),
        ({"extra": OPEN}, "I add two.", "Four", "stop"),
        ({"extra": CLOSED}, None, "Four", "stop"),
        ({"max_tokens": 3}, "I add", None, "length"),
        ({"max_tokens": 6}, "I add two.", None, "length"),
        ({"stop": "."}, "I add two", None, "stop"),
        ({"stop": "Fo"}, "I add two.", None, "stop"),
        ({"stop": "</think>"}, "I add two.", None, "stop"),
    ],
)
def test_a_model_reasons_and_answers(
    client: openai.OpenAI, options: dict[str, Any], reasoning: str | None, content: str | None, reason: str
) -> None:
    choice = ask(client, **options).choices[0]
    assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == (reasoning, content, reason)
    assert streamed(client, **options) == (reasoning or "", content or "", reason)
    assert [each.message for each in ask(client, n=2, **options).choices] == [choice.message] * 2


def test_each_token_is_counted_and_has_its_log_probability(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True)
    assert [token.token for token in answer.choices[0].logprobs.content][:-1] == SAID[1:-1]
    assert answer.usage.completion_tokens == len(SAID) - 1
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(THOUGHT)
    assert ask(client, extra=OPEN).usage.completion_tokens_details.reasoning_tokens == len(THOUGHT)
    assert ask(client, max_tokens=3).usage.completion_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize("extra", [{}, OPEN])
def test_the_form_of_an_answer_begins_behind_the_reasoning(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    message = ask(client, extra=extra, response_format=FORM).choices[0].message
    assert message.reasoning == "I add two."
    assert json.loads(message.content)["name"] in ("Ada", "Bob")
    assert streamed(client, extra=extra, response_format=FORM) == (message.reasoning, message.content, "stop")
    chosen = extra | {"structured_outputs": {"choice": ["yes", "no"]}}
    assert ask(client, extra=chosen).choices[0].message.content in ("yes", "no")
    cut = ask(client, extra=extra, response_format=FORM, max_tokens=2).choices[0]
    assert (cut.message.content, cut.finish_reason) == (None, "length")


def test_a_prompt_without_reasoning_has_the_form_at_once(client: openai.OpenAI) -> None:
    message = ask(client, extra=CLOSED, response_format=FORM).choices[0].message
    assert message.reasoning is None
    assert json.loads(message.content)["name"] in ("Ada", "Bob")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "greet"}}])
@pytest.mark.parametrize("extra", [{}, OPEN])
def test_a_forced_call_comes_behind_the_reasoning(client: openai.OpenAI, choice: Any, extra: dict[str, Any]) -> None:
    options: dict[str, Any] = {"extra": extra, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    message = ask(client, **options).choices[0].message
    assert message.reasoning == "I add two."
    [call] = message.tool_calls
    assert call.function.name == "greet"
    assert json.loads(call.function.arguments)["name"] in ("Ada", "Bob")
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True, **options)]
    reasons = [number for number, delta in enumerate(deltas) if getattr(delta, "reasoning", None)]
    calls = [number for number, delta in enumerate(deltas) if delta.tool_calls]
    assert max(reasons) < min(calls)
    cut = ask(client, **options | {"max_tokens": 3}).choices[0]
    assert (cut.message.tool_calls, cut.message.content, cut.finish_reason) == (None, None, "length")


def test_a_response_reasons_and_has_its_form(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    asked: dict[str, Any] = {
        "model": "thinker", "input": "2+2", "text": form, "temperature": 0, "extra_body": OPEN,
    }  # fmt: skip
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert json.loads(whole.output_text)["name"] in ("Ada", "Bob")
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output_text == whole.output_text
    cut = client.responses.create(**asked | {"max_output_tokens": 2})
    assert (cut.status, [(item.type, item.status) for item in cut.output]) == (  # type: ignore[union-attr]
        "incomplete", [("reasoning", "incomplete")],
    )  # fmt: skip
    again: Any = [{"role": "user", "content": "2+2"}, *whole.output, {"role": "user", "content": "And 3+3?"}]
    assert client.responses.create(**asked | {"input": again}).output_text == whole.output_text
