"""What the official client's documentation shows, as functions that any engine's tests call unchanged."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What does len return?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Paris", "Rome"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


class Event(BaseModel):
    kind: Literal["meeting", "party"]
    guests: Literal[1, 2, 3]


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=6, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 6


def streaming(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage is not None


def tools_loop(client: openai.OpenAI, model: str) -> None:
    """Call, run the tool, answer with its result."""
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    first = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, seed=1,
        max_tokens=200,
    )  # fmt: skip
    calls = first.choices[0].message.tool_calls
    assert calls
    messages.append(first.choices[0].message)
    for call in calls:
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["place"] in ("Paris", "Rome")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    # The example's chat template shows no tools, so that it could not choose.
    second = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=6
    )
    assert second.choices[0].finish_reason in ("stop", "length")


def parse(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=Event, max_tokens=100, seed=1
    )
    assert answer.choices[0].message.parsed is not None
    assert answer.choices[0].message.parsed.guests in (1, 2, 3)


def responses(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "Return the", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 8
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def responses_tools_loop(client: openai.OpenAI, model: str) -> None:
    """Call, run the tool, answer with its result; all input is sent again, as OpenAI's guide does without state."""
    asked: dict[str, Any] = {"model": model, "tools": [{"type": "function", **WEATHER["function"]}]}
    items: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    with client.responses.stream(
        input=items, tool_choice="required", parallel_tool_calls=False, max_output_tokens=200,
        extra_body={"seed": 1}, **asked,
    ) as events:  # fmt: skip
        first = events.get_final_response()
    items += first.output
    for call in first.output:
        assert call.type == "function_call"
        assert json.loads(call.arguments)["place"] in ("Paris", "Rome")
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    second = client.responses.create(input=items, tool_choice="none", max_output_tokens=6, **asked)
    assert second.output_text


def responses_parse(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.parse(
        model=model, input="What is on today?", text_format=Event, max_output_tokens=100, extra_body={"seed": 1}
    )
    assert answer.output_parsed is not None
    assert answer.output_parsed.guests in (1, 2, 3)


def embeddings(client: openai.OpenAI, model: str) -> None:
    answer = client.embeddings.create(model=model, input=["one text", "another one"])
    assert [item.index for item in answer.data] == [0, 1]
    assert len(answer.data[0].embedding) == len(answer.data[1].embedding) > 1
    assert answer.data[0].embedding != answer.data[1].embedding


GENERATING = (chat, streaming, tools_loop, parse)
RESPONDING = (responses, responses_tools_loop, responses_parse)
