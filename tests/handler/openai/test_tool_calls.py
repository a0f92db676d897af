"""Tool calls in a model's text: parsed whole and as the text comes, in each of the formats."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from medusa_handler.faults import ApiError
from medusa_handler.openai.tools.choice import tools_of
from medusa_handler.openai.tools.formats import (
    FORMATS,
    ForcedCallsParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
    NamedCallParser,
    ToolParser,
    format_of,
)

NAMES = frozenset(("weather", "time"))
TEMPLATE = (
    "{# tools: <tool_call> #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}


def parsed(make: Callable[[], ToolParser], text: str, step: int) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls (name and arguments) of a text that comes in pieces."""
    parser, content, calls = make(), "", []
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    for found in [*map(parser.push, pieces), parser.finish()]:
        content += found.content
        for call in found.calls:
            if call.name is not None:
                assert call.number == len(calls)
                assert call.id
                calls.append((call.name, ""))
            calls[call.number] = (calls[call.number][0], calls[call.number][1] + call.arguments)
    return content, calls


ONE = '{"name": "weather", "arguments": {"city": "Köln }\\" ]"}}'
ARGUMENTS = '{"city": "Köln }\\" ]"}'
HERMES = [
    ("just text", "just text", []),
    ("a <b> < tool_call>", "a <b> < tool_call>", []),
    (f"<tool_call>\n{ONE}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    (f"Sure.\n<tool_call>{ONE}</tool_call>", "Sure.", [("weather", ARGUMENTS)]),
    (
        f'<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{{"arguments": {{}}, "name": "time"}}\n</tool_call>\n',
        "",
        [("weather", ARGUMENTS), ("time", "{}")],
    ),
    ('<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    ('<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", "{}")]),
    ('<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("time", '{"a": 1}')]),
    ('<tool_call>{"id": 3, "x": [1, {}], "name": "time", "arguments": {"a": [1, {"b": {}}]}}</tool_call> done',
     " done", [("time", '{"a": [1, {"b": {}}]}')]),
    ("<tool_call>call me</tool_call>", "<tool_call>call me</tool_call>", []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "we', '<tool_call>{"name": "we', []),
    ('<tool_call>{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    (f"<tool_call>{ONE}", "", [("weather", ARGUMENTS)]),
    ("a <tool_ca", "a <tool_ca", []),
]  # fmt: skip
MISTRAL = [
    ("just [text] [TOOL", "just [text] [TOOL", []),
    (f"[TOOL_CALLS] [{ONE}]", "", [("weather", ARGUMENTS)]),
    (f'[TOOL_CALLS][{ONE}, {{"name": "time", "arguments": {{}}}}]', "", [("weather", ARGUMENTS), ("time", "{}")]),
    (f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", [("weather", ARGUMENTS)]),
    (f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]time{{}}", "", [("weather", ARGUMENTS), ("time", "{}")]),
    (f"[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{ARGUMENTS}", "", [("weather", ARGUMENTS)]),
    ("[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
    ("Well. [TOOL_CALLS]time{}", "Well.", [("time", "{}")]),
    ("[TOOL_CALLS] [hello] there", "[TOOL_CALLS] [hello] there", []),
    ("[TOOL_CALLS] [", "[TOOL_CALLS] [", []),
    ("[TOOL_CALLS]  no call", "[TOOL_CALLS]  no call", []),
    ("[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ('[TOOL_CALLS] [{"answer": 42}]', '[TOOL_CALLS] [{"answer": 42}]', []),
    ('[TOOL_CALLS] [{"answer": 4', '[TOOL_CALLS] [{"answer": 4', []),
    (f"[TOOL_CALLS] [{ONE}, oops", ", oops", [("weather", ARGUMENTS)]),
    (f'[TOOL_CALLS] [{{"answer": 42}}, {ONE}]', '[TOOL_CALLS] [{"answer": 42}', [("weather", ARGUMENTS)]),
    (f"[TOOL_CALLS]{ONE}", "", [("weather", ARGUMENTS)]),
    ("[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}", []),
]
LLAMA = [
    ("just text", "just text", []),
    (ONE.replace("arguments", "parameters"), "", [("weather", ARGUMENTS)]),
    ("<|python_tag|>" + ONE, "", [("weather", ARGUMENTS)]),
    (f'{ONE}; {{"name": "time", "parameters": {{}}}}', "", [("weather", ARGUMENTS), ("time", "{}")]),
    ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ('{"answer": 42}', '{"answer": 42}', []),
    ("{1, 2}", "{1, 2}", []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (' {"name": "we', ' {"name": "we', []),
    ("<|pyth", "<|pyth", []),
]
CASES = [
    *((HermesParser, *case) for case in HERMES),
    *((MistralParser, *case) for case in MISTRAL),
    *((lambda: Llama3Parser(NAMES), *case) for case in LLAMA),
    (ForcedCallsParser, '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "x"}}]', "",
     [("time", "{}"), ("weather", '{"city": "x"}')]),
    (ForcedCallsParser, '[{"name": "time", "parameters": {}}, {"na', "", [("time", "{}")]),
    (ForcedCallsParser, '[{"name": "ti', "", []),
    (lambda: NamedCallParser("weather"), '{"city": "x"}', "", [("weather", '{"city": "x"}')]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
def test_calls_are_told_from_text(
    make: Callable[[], ToolParser], text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for step in (1, 2, 3, 7, len(text)):
        assert parsed(make, text, step) == (content, calls), step


@pytest.mark.parametrize("make", [HermesParser, MistralParser, lambda: Llama3Parser(NAMES)])
def test_the_work_for_a_text_grows_with_its_length(make: Callable[[], ToolParser]) -> None:
    """A whole answer of 250,000 characters once took 14 s of CPU time, and twice as many four times that."""

    def cpu_s(length: int) -> float:
        parser, began = make(), time.process_time()
        content = parser.push("€" * length).content + parser.finish().content
        assert len(content) == length
        return time.process_time() - began

    # 20 if it grows with the length, 400 with its square; one try of three shows it
    assert any(cpu_s(400_000) / cpu_s(20_000) < 60 for _ in range(3))


def test_the_format_is_the_templates() -> None:
    def name(template: str, chosen: str = "auto") -> str | None:
        found = format_of(chosen, template)
        return None if found is None else found.name

    assert name("… within <tool_call></tool_call> XML tags") == "hermes"
    assert name("{{ '[TOOL_CALLS] [' }}") == "mistral"
    assert name("{{- '<|python_tag|>' }}") == "llama3_json"
    assert name("{{ messages }}") is None
    assert name("<tool_call>", "mistral") == "mistral"
    assert name("<tool_call>", "none") is None
    assert len(FORMATS[0].new_id()) == 9


def ask(client: openai.OpenAI, say: str, **options: Any) -> Any:
    options = {"tools": [WEATHER, TIME], **options}
    return client.chat.completions.create(
        model="words", messages=[{"role": "user", "content": f"say:{say}"}], **options
    )


def test_an_answer_with_calls(client: openai.OpenAI) -> None:
    choice = ask(client, f"<tool_call>{ONE}</tool_call>").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": 'Köln }" ]'}
    text = ask(client, "plain words").choices[0]
    assert (text.message.content, text.message.tool_calls, text.finish_reason) == ("plain words", None, "stop")


def test_a_stream_with_calls(client: openai.OpenAI) -> None:
    say = f'Sure.\n<tool_call>{ONE}</tool_call><tool_call>{{"name": "time"}}</tool_call>'
    whole = ask(client, say).choices[0].message
    content, calls, reason = "", [], None
    for chunk in ask(client, say, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
        for call in delta.tool_calls or []:
            if call.id is not None:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    assert (content, reason) == ("Sure.", "tool_calls")
    assert calls == [[call.function.name, call.function.arguments] for call in whole.tool_calls]
    with client.chat.completions.stream(
        model="words", messages=[{"role": "user", "content": f"say:{say}"}], tools=[WEATHER, TIME]
    ) as stream:
        final = stream.get_final_completion().choices[0].message
    assert [call.function.arguments for call in final.tool_calls] == [arguments for _, arguments in calls]


def test_several_answers_are_parsed_apart(client: openai.OpenAI) -> None:
    say = f"<tool_call>{ONE}</tool_call>"
    assert [len(choice.message.tool_calls) for choice in ask(client, say, n=3).choices] == [1, 1, 1]
    names: dict[int, str] = {}
    for chunk in ask(client, say, n=3, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            names[chunk.choices[0].index] = names.get(chunk.choices[0].index, "") + (call.function.name or "")
    assert names == {0: "weather", 1: "weather", 2: "weather"}


def test_what_was_chosen_about_tools_counts(client: openai.OpenAI) -> None:
    say = f'<tool_call>{ONE}</tool_call><tool_call>{{"name": "time"}}</tool_call>'
    untouched = ask(client, say, tool_choice="none").choices[0]
    assert (untouched.message.content, untouched.finish_reason) == (say, "stop")
    assert len(ask(client, say).choices[0].message.tool_calls) == 2
    assert len(ask(client, say, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    required = ask(client, '[{"name": "time", "parameters": {}}]', tool_choice="required").choices[0]
    assert (required.message.tool_calls[0].function.name, required.finish_reason) == ("time", "tool_calls")
    chosen: Any = {"type": "function", "function": {"name": "weather"}}
    named = ask(client, '{"city": "x"}', tool_choice=chosen).choices[0]
    assert named.message.tool_calls[0].function.arguments == '{"city": "x"}'
    assert named.finish_reason == "stop"


@pytest.mark.parametrize("said", ["[", '[{"name": "ti'])
def test_a_forced_call_that_is_cut_before_its_name_has_no_content(client: openai.OpenAI, said: str) -> None:
    cut = ask(client, said, tool_choice="required").choices[0]
    assert (cut.message.content, cut.message.tool_calls) == (None, None)
    chunks = list(ask(client, said, tool_choice="required", stream=True))
    assert not any(chunk.choices[0].delta.content or chunk.choices[0].delta.tool_calls for chunk in chunks)


def test_a_model_whose_calls_are_not_known_answers_with_text(serve: Callable[..., Any]) -> None:
    served = serve(files={"chat_template.jinja": TEMPLATE}, tool_call_parser="none")
    served.wait_ready()
    say = f"<tool_call>{ONE}</tool_call>"
    body = {"messages": [{"role": "user", "content": f"say:{say}"}], "tools": [WEATHER]}
    message = served.request("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]
    assert message["content"] == say


def test_what_the_template_has_no_place_for_is_refused(serve: Callable[..., Any]) -> None:
    served = serve(files={"chat_template.jinja": TEMPLATE.replace("tools", "")})
    served.wait_ready()

    def asked(**options: Any) -> tuple[int, Any]:
        body = {"messages": [{"role": "user", "content": "say:hi"}], **options}
        return served.request("POST", "/v1/chat/completions", body)[:2]

    for name, value in (("tools", [WEATHER]), ("documents", [{"text": "a"}])):
        status, answer = asked(**{name: value})
        assert (status, answer["error"]["param"]) == (400, name)
        assert "chat template" in answer["error"]["message"]
    assert asked()[0] == asked(tools=[WEATHER], tool_choice="none")[0] == asked(tools=[], documents=[])[0] == 200
    assert asked(tools=[WEATHER], tool_choice="required")[0] == 200  # the form of the answer is the tool's


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_bad_tools_are_named(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "x", **options)
    assert refused.value.param == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_schema_that_is_nested_too_deeply_to_be_written_is_refused(choice: Any) -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    with pytest.raises(ApiError, match="less depth"):
        tools_of({"tools": [tool], "tool_choice": choice}).output_constraint(None)
