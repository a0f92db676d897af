"""The official client's structured outputs and tools loop, against the bundled model."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from medusa_adapters.trial import Trial
from pydantic import BaseModel

pytest.importorskip("llguidance", reason="structured outputs need llguidance")

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Köln"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
    "additionalProperties": False}}}  # fmt: skip


class Step(BaseModel):
    explanation: str
    output: int


class Reasoning(BaseModel):
    steps: list[Step]
    final: bool


@pytest.fixture(scope="module")
def url(example: Path) -> Iterator[str]:
    with Trial("--model", str(example)) as function:
        yield function.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_parse_returns_the_models_type(client: openai.OpenAI, url: str) -> None:
    """OpenAI's example, with a bias towards what ends a string and a list: this model knows of neither."""
    answer = client.chat.completions.parse(
        model="pydoc-lm",
        messages=[{"role": "user", "content": "solve 8x + 31 = 2"}],
        response_format=Reasoning,
        temperature=0,
        max_tokens=300,
        logit_bias=_ending(url),
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Reasoning)


def test_every_form_in_completions(client: openai.OpenAI) -> None:
    def text(**options: Any) -> str:
        options = {"max_tokens": 40, "temperature": 0, "extra_body": {"structured_outputs": options}}
        return client.completions.create(model="pydoc-lm", prompt="Returns", **options).choices[0].text

    assert re.fullmatch("[a-f]{3}[0-9]", text(regex="[a-f]{3}[0-9]"))
    assert text(choice=["maybe", "never"]) in ("maybe", "never")
    assert text(grammar='root ::= "x" ("y" | "z")') in ("xy", "xz")
    assert json.loads(text(json={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}))


def test_several_streamed_answers_have_their_form(client: openai.OpenAI) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        model="pydoc-lm", messages=[{"role": "user", "content": "a number"}], n=3, seed=1, stream=True, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}},
    ):  # fmt: skip
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert all(0 <= json.loads(text)["n"] <= 99 for text in texts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tools_loop(client: openai.OpenAI, stream: bool) -> None:
    """The model is made to call, the call is answered, and the model goes on: OpenAI's example of a loop."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: Any = {"model": "pydoc-lm", "tools": [WEATHER, TIME], "temperature": 0, "max_tokens": 200}
    if stream:
        with client.chat.completions.stream(
            messages=messages, tool_choice="required", parallel_tool_calls=False, **options
        ) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(
            messages=messages, tool_choice="required", parallel_tool_calls=False, **options
        ).choices[0]
    assert choice.finish_reason == "tool_calls"
    messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in choice.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == ({"city", "days"} if call.function.name == "get_weather" else {"zone"})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21})})
    final = client.chat.completions.create(messages=messages, tool_choice="none", **options).choices[0]
    assert final.finish_reason in ("stop", "length")
    assert final.message.tool_calls is None


def test_a_certain_function_is_called(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="pydoc-lm", messages=[{"role": "user", "content": "?"}], tools=[WEATHER, TIME], max_tokens=100,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    ).choices[0]  # fmt: skip
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"  # type: ignore[union-attr]
    arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
    assert arguments["city"] in ("Paris", "Köln")
    assert 1 <= arguments["days"] <= 9


def test_what_is_no_schema_names_the_field(client: openai.OpenAI) -> None:
    for options, param in (
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}},
         "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "["}}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tools"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="pydoc-lm", messages=[{"role": "user", "content": "x"}], **options  # type: ignore[call-overload]
            )  # fmt: skip
        assert refused.value.param == param


def _ending(url: str) -> dict[str, int]:
    found = {}
    for text in ('"', "]", "}"):
        body = json.dumps({"prompt": text}).encode()
        asked = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            found[str(json.load(answer)["tokens"][-1])] = 50
    return found
