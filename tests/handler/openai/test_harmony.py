"""Answers in the format of gpt-oss: as text in pieces, in chats and responses, and in what they are rendered from."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import openai
import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_handler.model.harmony import HarmonyParser, HarmonyReasoning, content_of, harmony_reasoning, turns
from medusa_handler.openai.answer import Choice
from medusa_handler.openai.responses.output import response_output
from medusa_handler.openai.tools.formats import HarmonyCallParser, format_of
from medusa_runtime.engine.base import Delta, StructuredOutputs
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

# What the engine of these tests says stands between say: and <assistant>.
TEMPLATE = (
    "{{ reasoning_effort }}{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}<assistant>{% endif %}{% endfor %}{# {{ tools }} #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TIME: Any = {"type": "function", "function": {"name": "time"}}
FLAT_TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

ASSISTANT = "<|start|>assistant"
THINK = "<|channel|>analysis<|message|>Hm."
FINAL = "<|channel|>final<|message|>Four."
PREAMBLE = "<|channel|>commentary<|message|>I look."
CALL = '<|channel|>commentary to=functions.time <|constrain|>json<|message|>{"a": 1}'
CALLS = [("time", '{"a": 1}')]
NEXT = f"<|end|>{ASSISTANT}"

TEXTS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{THINK}{NEXT}{FINAL}<|return|>", "Hm.", "Four.", []),
    (f"{THINK}{NEXT}{CALL}<|call|>", "Hm.", "", CALLS),
    (f"{THINK}{NEXT}{PREAMBLE}{NEXT}{THINK}{NEXT}{CALL}", "Hm.\nHm.", "I look.", CALLS),
    (f"{THINK}{NEXT}{CALL}{NEXT}{CALL}<|call|>", "Hm.", "", CALLS * 2),
    (f"{CALL}<|en", "", "", [("time", '{"a": 1}<|en')]),
    (f"{PREAMBLE}{NEXT}{FINAL}", "", "I look.\nFour.", []),
    (f"{FINAL}<|end|>\n{ASSISTANT}{FINAL}", "", "Four.\nFour.", []),
    # The other ways in which the model writes a call.
    (' to=functions.time<|channel|>commentary json<|message|>{"a": 1}', "", "", CALLS),
    ('<|channel|>commentary to=functions.time<|constrain|>json<|message|>{"a": 1}', "", "", CALLS),
    ('<|channel|>commentary to=functions.time code<|message|>{"a": 1}', "", "", CALLS),
    ('<|channel|>analysis to=time<|message|>{"a": 1}', "", "", CALLS),
    # Messages for its own tools, which nobody offered, and by others.
    ("<|channel|>commentary to=python<|message|>1", "", "", []),
    ("<|channel|>commentary to=browser.search<|message|>1", "", "", []),
    ("<|channel|>analysis to=python<|message|>1", "1", "", []),
    (f"{FINAL}<|end|><|start|>user<|message|>And?<|end|>", "", "Four.", []),
    # Cut within a header.
    ("<|channel|>", "", "", []),
    ("<|channel|>ana", "", "", []),
    (" to=functions.ti", "", "", []),
    (f"{THINK}<|end|><|start|>assi", "Hm.", "", []),
    (f"{THINK}{NEXT}<|channel|>commentary to=functions.time <|constrain|>json", "Hm.", "", []),
    (f"{THINK}{NEXT}<|channel|>commentary to=functions.time <|constrain|>json<|message|>", "Hm.", "", [("time", "")]),
    # None of the format's.
    ("Four.", "", "Four.", []),
    (" \n", "", " \n", []),
    ("", "", "", []),
    (" too", "", " too", []),
    ("<|message|>Four.", "", "Four.", []),
    ("<|channel|>other<|message|>Four.", "", "Four.", []),
    ("<|channel|>final to=functions.<|message|>Four.", "", "Four.", []),
    ("<|channel|>final It is four.", "", "final It is four.", []),
    ("<|channel|>final It is four.<|end|>", "", "final It is four.", []),
    (f"{THINK}{ASSISTANT}{FINAL}", "Hm.", "Four.", []),
    (f"{THINK}<|end|>{FINAL}", "Hm.", "Four.", []),
    (f"{THINK}<|end|> Four.", "Hm.", " Four.", []),
    (f"{FINAL}<|end|> Or five.", "", "Four. Or five.", []),
    (f"{FINAL} <|channel|> is a token <|, <|end", "", "Four. <|channel|> is a token <|, <|end", []),
    # What is on both sides of a marker makes no other one.
    (f"{FINAL}<|en<|end|>d|> It is.", "", "Four.<|end|> It is.", []),
    (f"{FINAL}<|sta<|end|>rt|>assistant{CALL}", "", f"Four.<|start|>assistant{CALL}", []),
    ("<|channel|>final It is <|en<|channel|>d|> four.", "", "final It is <|en d|> four.", []),
]


def read(pieces: Iterable[str], begun: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    """The reasoning, the content, and the calls with their arguments."""
    parser, calls_parser = HarmonyParser(begun), HarmonyCallParser(frozenset(["time"]))
    reasoning, content = "", ""
    calls: list[tuple[str, list[str]]] = []
    parts = [(piece, False) for piece in pieces] + [("", True)]
    for piece, last in parts:
        parsed = []
        for thought, rest in parser.push(piece, last=last):
            reasoning += thought
            parsed.append(calls_parser.push(rest))
        for found in [*parsed, calls_parser.finish()] if last else parsed:
            content += found.content
            for call in found.calls:
                if call.name is not None:
                    assert call.number == len(calls)
                    assert call.id
                    calls.append((call.name, []))
                calls[call.number][1].append(call.arguments)
    return reasoning, content, [(name, "".join(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), TEXTS)
def test_messages_are_told_apart_wherever_the_text_is_cut(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(text) == (reasoning, content, calls)
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]]) == (reasoning, content, calls), text[:cut]


MARKUP = [
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>", "assistant",
    "analysis", "final", "commentary", " to=functions.time", " to=python", "user", "json", " ", "\n", "hi", "<|", "<",
    "|>", "a b c d", "<|en", "d|>", "<|sta", "rt|>", THINK, FINAL, CALL, NEXT,
]  # fmt: skip


def test_fuzzed_text_of_a_model() -> None:
    """No text breaks the parsers, or makes a difference by the pieces in which it comes."""

    def check(data: bytes) -> None:
        text = data.decode(errors="replace")
        whole = read([text])
        assert read(text) == whole
        assert read(text[at : at + 7] for at in range(0, len(text), 7)) == whole
        assert read([text[:9], *text[9:]], f"{NEXT}{FINAL}") == read([text], f"{NEXT}{FINAL}")
        assert "".join(content_of([text], HarmonyReasoning(""))) == whole[1]

    seeds = [text.encode() for text, *_ in TEXTS]
    fuzz(st.lists(st.sampled_from(MARKUP), max_size=20).map("".join).map(str.encode), check, seeds)


def items(pieces: Iterable[str], parallel: bool) -> list[tuple[str, ...]]:
    """What the items of a response say that comes in pieces. Its events are those of its items."""
    output = response_output(HarmonyCallParser(frozenset("t")), parallel=parallel, alternatives=None)
    choice, events = Choice(HarmonyParser("")), []
    for text, reason in [*((piece, None) for piece in pieces), ("", "stop")]:
        choice.add(Delta("x", text, (1,), finish_reason=reason))
        events += output.add(choice)
        choice.forget()
    events += output.finish("completed")
    deltas = dict.fromkeys((item["id"] for item in output.items), "")
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] += event["delta"]
    found = []
    for item in output.items:
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas[item["id"]] == text
        found.append((item["type"], item.get("name", ""), text))
    return found


def test_fuzzed_text_in_a_response() -> None:
    """The items of a response, and their order, do not depend on the pieces in which it comes."""

    def check(data: bytes) -> None:
        text = data.decode(errors="replace")
        for parallel in (True, False):
            whole = items([text], parallel)
            assert items(text, parallel) == whole
            assert items((text[at : at + 5] for at in range(0, len(text), 5)), parallel) == whole

    seeds = [text.encode() for text, *_ in TEXTS]
    fuzz(st.lists(st.sampled_from(MARKUP), max_size=20).map("".join).map(str.encode), check, seeds)


@pytest.mark.parametrize(
    "unit",
    ["x", " ", "<", "<|", "<|channel|>", "<|end|>", "<|start|>", "<|message|>", "to=", FINAL, CALL, NEXT + THINK],
)
@pytest.mark.parametrize("first", ["", "<|channel|>", FINAL])
def test_the_work_for_a_text_grows_with_its_length(first: str, unit: str) -> None:
    def cpu_s(count: int) -> float:
        began = time.process_time()
        read(itertools.chain([first], itertools.repeat(unit, count)))
        return time.process_time() - began

    # 20 if it grows with the length, 400 with its square; one try of three shows it
    assert any(cpu_s(10_000) / cpu_s(500) < 80 for _ in range(3))


def test_an_answer_may_have_begun_in_the_prompt() -> None:
    def found(prompt: str) -> Any:
        reasoning = harmony_reasoning("auto", TEMPLATE, prompt)
        assert reasoning is not None
        return read([f" So{NEXT}{FINAL}"], reasoning.begun)

    assert found(f"<|start|>user<|message|>Hi<|end|>{ASSISTANT}{THINK}") == (" So", "Four.", [])
    assert found(f"<|start|>user<|message|>Hi<|end|>{ASSISTANT}{FINAL}") == ("", " So\nFour.", [])
    assert found(f"<|start|>user<|message|>Hi<|end|>{ASSISTANT}") == ("", " So\nFour.", [])
    assert found("") == ("", " So\nFour.", [])
    assert harmony_reasoning("auto", "<|channel|>", "") is None
    assert harmony_reasoning("none", TEMPLATE, "") is None
    assert harmony_reasoning("openai_gptoss", "", ASSISTANT) == HarmonyReasoning("")


def test_a_form_is_that_of_the_final_message_or_of_a_call() -> None:
    form, header = StructuredOutputs("regex", "a"), "<|channel|>final<|message|>"
    begun = HarmonyReasoning(THINK).before(form)
    assert HarmonyReasoning("").before(form) == (*form[:2], "<|channel|>analysis<|message|>", NEXT, header)
    assert begun == (*form[:2], "", NEXT, header)
    assert HarmonyReasoning(FINAL).before(form) == form
    as_json = HarmonyReasoning("").before(StructuredOutputs("json_schema", "{}"))
    assert as_json.header == "<|channel|>final <|constrain|>json<|message|>"  # as with vLLM
    openai_calls = format_of("auto", TEMPLATE)
    assert openai_calls is not None
    assert openai_calls.forced is not None
    forced = openai_calls.forced({"time": {}})
    assert forced[:2] == ("tagged_json", '[["time <|constrain|>json<|message|>", {}]]')
    assert HarmonyReasoning("").before(forced).header == "<|channel|>commentary to=functions."
    assert HarmonyReasoning(FINAL).before(forced).header == f"{NEXT}<|channel|>commentary to=functions."


def ask(client: openai.OpenAI, say: str, *, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    messages = [{"role": "user", "content": f"say:{say}"}]
    return client.chat.completions.create(model="words", extra_body=extra, **{"messages": messages, **options})


def streamed(client: openai.OpenAI, say: str, **options: Any) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """The reasoning, content, calls and finish reason."""
    reasoning, content, calls, reason = "", "", [], None
    for chunk in ask(client, say, stream=True, **options):
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.function.name is not None:
                calls.append((call.function.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.function.arguments)
        reason = choice.finish_reason or reason
    return reasoning, content, calls, reason


@pytest.mark.parametrize(("say", "reasoning", "content", "calls"), [each for each in TEXTS if each[0]])
@pytest.mark.parametrize("tools", [[], [TIME]])
def test_a_chat_has_channels_as_fields(
    client: openai.OpenAI,
    say: str,
    reasoning: str,
    content: str,
    calls: list[tuple[str, str]],
    tools: list[Any],
) -> None:
    offered = {"tools": tools} if tools else {}
    calls = calls if tools else []
    choice = ask(client, say, **offered).choices[0]
    assert (choice.message.reasoning or "", choice.message.content or "") == (reasoning, content)
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert found == calls
    reason = "tool_calls" if calls else "stop"
    assert choice.finish_reason == reason
    assert streamed(client, say, **offered) == (reasoning, content, calls, reason)
    hidden = ask(client, say, extra={"include_reasoning": False}, **offered).choices[0].message
    assert (hidden.reasoning, hidden.content or "") == (None, content)


def test_only_the_first_call_counts_if_one_is_wanted(client: openai.OpenAI) -> None:
    say = f"{THINK}{NEXT}{CALL}{NEXT}{CALL}"
    [call] = ask(client, say, tools=[TIME], parallel_tool_calls=False).choices[0].message.tool_calls
    assert call.function.name == "time"
    assert streamed(client, say, tools=[TIME], parallel_tool_calls=False) == ("Hm.", "", CALLS, "tool_calls")
    ignored = ask(client, say, tools=[TIME], tool_choice="none").choices[0]
    assert (ignored.message.tool_calls, ignored.finish_reason) == (None, "stop")


def test_the_effort_reaches_the_template_if_it_is_one(client: openai.OpenAI, served: Any) -> None:
    served.prompts()
    ask(client, FINAL, reasoning_effort="high")
    client.responses.create(model="words", input=f"say:{FINAL}", reasoning={"effort": "low"})
    high, low = served.prompts()
    assert high.startswith("'high")
    assert low.startswith("'low")
    with pytest.raises(openai.BadRequestError, match="low, medium or high") as refused:
        ask(client, FINAL, reasoning_effort="none")
    assert refused.value.param == "reasoning_effort"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="words", input="x", reasoning={"effort": "none"})
    assert refused.value.param == "reasoning.effort"


def test_a_final_message_may_be_continued(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "say: and four."}, {"role": "assistant", "content": "Three"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    choice = ask(client, "", messages=messages, extra=more).choices[0]
    assert (choice.message.reasoning, choice.message.content) == (None, " and four.")


def respond(served: Any, say: str, **body: Any) -> tuple[Response, list[Any]]:
    """The whole response, and the events of its stream."""
    asked = {"input": f"say:{say}", **body}
    status, answer, _ = served.request("POST", "/v1/responses", asked)
    assert status == 200, answer
    raw = served.request("POST", "/v1/responses", asked | {"stream": True})[1]
    lines = [line for line in raw.decode().split("\n") if line.startswith("data: ")]
    events = [EVENTS.validate_json(line.removeprefix("data: "), strict=True) for line in lines]
    return Response.model_validate(answer, strict=True), events


def items_of(response: Response) -> list[Any]:
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)  # type: ignore[union-attr,index]
        for item in response.output
    ]


def test_a_response_has_an_item_for_each_message(served: Any) -> None:
    say = f"{THINK}{NEXT}{PREAMBLE} <{NEXT}{THINK}{NEXT}{FINAL}{NEXT}{THINK}{NEXT}{CALL}<|call|>"
    whole, events = respond(served, say, tools=[FLAT_TIME])
    expected = [
        ("reasoning", "Hm."), ("message", "I look. <"), ("reasoning", "Hm."), ("message", "Four."),
        ("reasoning", "Hm."), ("function_call", '{"a": 1}'),
    ]  # fmt: skip
    assert items_of(whole) == items_of(events[-1].response) == expected
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == list(range(len(expected)))
    texts = dict.fromkeys((event.item.id for event in done), "")
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] += event.delta
    assert list(texts.values()) == [text for _, text in expected]
    hidden, events = respond(served, say, tools=[FLAT_TIME], include_reasoning=False)
    together = [("message", "I look. <\nFour."), ("function_call", '{"a": 1}')]
    assert items_of(hidden) == items_of(events[-1].response) == together


def test_the_tokens_of_a_responses_text_are_not_those_of_its_markup(served: Any) -> None:
    whole, _ = respond(served, f"{THINK}{NEXT}{FINAL}", include=["message.output_text.logprobs"])
    tokens = "".join(token.token for token in whole.output[-1].content[0].logprobs)  # type: ignore[union-attr,index]
    assert "Four.".endswith(tokens)
    assert len(tokens) > 2


def test_the_output_of_a_response_can_be_the_next_ones_input(served: Any) -> None:
    whole, _ = respond(served, f"{THINK}{NEXT}{PREAMBLE}{NEXT}{CALL}", tools=[FLAT_TIME])
    served.prompts()
    output = {"type": "function_call_output", "call_id": whole.output[-1].call_id, "output": "9"}  # type: ignore[union-attr]
    items = [{"role": "user", "content": "a"}, *(item.model_dump() for item in whole.output), output]
    assert served.request("POST", "/v1/responses", {"input": items, "tools": [FLAT_TIME]})[0] == 200
    assert served.prompts() == [
        repr(
            f"<user>a<assistant>{ASSISTANT}<|channel|>analysis<|message|>Hm.\nI look.<|end|>{ASSISTANT} "
            f'to=functions.time<|channel|>commentary json<|message|>{{"a": 1}}<|call|><tool>9<assistant>{ASSISTANT}'
        )
    ]


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_each_call_of_a_message_becomes_a_turn_with_its_results() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning": "r", "tool_calls": [call("x"), call("y"), 1]},
        {"role": "tool", "tool_call_id": "y", "content": "of y"},
        {"role": "tool", "tool_call_id": "x", "content": "of x"},
        {"role": "tool", "tool_call_id": ["z"], "content": "of none"},
        {"role": "assistant", "content": "b", "tool_calls": None, "thinking": None},
        {"role": "assistant", "content": "c", "tool_calls": [], "thinking": "t"},
        {"role": "assistant", "content": ["d"], "tool_calls": [call("x")], "thinking": 1},
    ]
    user, one, of_x, other, of_y, bad, of_none, b, c, d = turns(messages)
    assert [user, of_x, of_y, of_none] == [messages[0], messages[3], messages[2], messages[4]]
    assert (one["thinking"], one["tool_calls"]) == ("r", [call("x")])
    assert (other["tool_calls"], bad["tool_calls"], "thinking" in other) == ([call("y")], [1], False)
    assert b == {"role": "assistant", "content": "b"}
    assert c == {"role": "assistant", "content": "c", "thinking": "t"}
    assert d == {"role": "assistant", "content": ["d"], "tool_calls": [call("x")]}


def test_a_chat_that_comes_back_is_rendered(client: openai.OpenAI, served: Any) -> None:
    answer = ask(client, f"{THINK}{NEXT}{PREAMBLE}{NEXT}{CALL}", tools=[TIME]).choices[0].message
    messages: Any = [
        {"role": "user", "content": "a"},
        answer.model_dump(),
        {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "9"},
    ]
    served.prompts()
    ask(client, "", messages=messages, tools=[TIME])
    [prompt] = served.prompts()
    assert "analysis<|message|>Hm.\\nI look.<|end|>" in prompt
    plain = ask(client, f"{THINK}{NEXT}{FINAL}").choices[0].message
    ask(client, "", messages=[messages[0], plain.model_dump(), messages[0]])
    assert served.prompts()[-1] == repr(f"<user>a<assistant>{ASSISTANT}{FINAL}<user>a<assistant>{ASSISTANT}")


def test_a_body_without_a_route_is_answered_in_the_same_way(served: Any) -> None:
    body = {"messages": [{"role": "user", "content": f"say:{THINK}{NEXT}{FINAL}"}]}
    message = served.request("POST", "/", body)[1]["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Four.")


def test_a_handlers_chat_is_the_content_alone(serve: Callable[..., Any]) -> None:
    served = serve(handler="model/handler.py:Handler", engine=True, files={"chat_template.jinja": TEMPLATE})
    say = f"{THINK}{NEXT}{PREAMBLE}{NEXT}{CALL}{NEXT}{FINAL}"
    body = {"messages": [{"role": "user", "content": f"say:{say}"}]}
    assert served.request("POST", "/", body)[1] == {"answer": "I look.\nFour."}
    assert "".join(content_of(say, HarmonyReasoning(""))) == "I look.\nFour."


def test_the_operator_may_choose_the_format_or_none(serve: Callable[..., Any]) -> None:
    say = f"{THINK}{NEXT}{FINAL}"
    body = {"messages": [{"role": "user", "content": f"say:{say}"}]}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<assistant><|start|>assistant{# {{ tools }} #}"
    served = serve(files={"chat_template.jinja": template}, reasoning_parser="openai_gptoss")
    message = served.request("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Four.")
    served = serve(files={"chat_template.jinja": template}, reasoning_parser="none", tool_call_parser="openai")
    body["messages"][0]["content"] = f"say:{THINK}{NEXT}{CALL}"
    called = served.request("POST", "/v1/chat/completions", body | {"tools": [TIME]})[1]["choices"][0]
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert called["message"]["content"] == "Hm."


def test_anthropics_messages_have_a_block_for_each_message(served: Any) -> None:
    say = f"{THINK}{NEXT}{PREAMBLE}{NEXT}{CALL}<|call|>"
    messages: list[Any] = [{"role": "user", "content": f"say:{say}"}]
    tool = {"name": "time", "input_schema": {"type": "object"}}
    asked = {"messages": messages, "max_tokens": 99, "tools": [tool], "output_config": {"effort": "max"}}
    served.prompts()
    status, answer, _ = served.request("POST", "/v1/messages", asked)
    assert (status, answer["stop_reason"]) == (200, "tool_use")
    content = answer["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert (content[0]["thinking"], content[1]["text"], content[2]["input"]) == ("Hm.", "I look.", {"a": 1})
    raw = served.request("POST", "/v1/messages", asked | {"stream": True})[1].decode()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n") if line.startswith("data: ")]
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]
    assert served.prompts()[0].startswith("'high<user>")
    result = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": "9"}
    again = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    again.append({"role": "user", "content": [result]})
    off = asked | {"messages": again, "thinking": {"type": "disabled"}}
    assert served.request("POST", "/v1/messages", off)[0] == 200
    assert served.prompts() == [
        repr(
            f"low<user>a<assistant>{ASSISTANT}<|channel|>analysis<|message|>Hm.\nI look.<|end|>{ASSISTANT} "
            f'to=functions.time<|channel|>commentary json<|message|>{{"a": 1}}<|call|><tool>9<assistant>{ASSISTANT}'
        )
    ]
