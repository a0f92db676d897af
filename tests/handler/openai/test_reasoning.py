"""The reasoning before an answer: told from the rest in chats and responses, whole and as the text comes."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from medusa_handler.openai.reasoning import Reasoning, TaggedReasoning, TagParser, reasoning_of
from medusa_runtime.config import from_env
from medusa_runtime.engine.base import StructuredOutputs
from medusa_runtime.errors import ConfigError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted_server import ScriptedServer

# Like Qwen3's, and with ``thinking`` like DeepSeek-R1's, which opens the reasoning in the prompt.
TEMPLATE = (
    "{# tools: <tool_call> #}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
CALL = '<tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>'
TIME: Any = {"type": "function", "function": {"name": "time"}}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

TEXTS = [
    ("<think>\na </thin\n</think>\n\nb", "before", "\na </thin\n", "\n\nb"),
    (" \n<think>a</think>b", "before", "a", "b"),
    ("a</think>b", "before", "", "a</think>b"),
    ("<thinking>a", "before", "", "<thinking>a"),
    ("<thin", "before", "", "<thin"),
    (" ", "before", "", " "),
    ("<think></think>b", "before", "", "b"),
    ("<think>a <think>b</think>c</think>", "before", "a <think>b", "c</think>"),
    ("<think>a </thi", "before", "a </thi", ""),
    ("<think>", "before", "", ""),
    ("a</think>b", "inside", "a", "b"),
    ("\n\n a <</think>", "inside", "\n\n a <", ""),
    ("<think>\na</think>b", "inside", "\na", "b"),
    ("a", "inside", "a", ""),
    ("", "inside", "", ""),
    ("<think>a</think>b", "behind", "", "<think>a</think>b"),
    (f"<think>a\n{CALL}", "before", "a\n", CALL),
    (f"<think>a{CALL}</think>", "before", "a", f"{CALL}</think>"),
]


def joined(found: list[tuple[str, str]]) -> tuple[str, str]:
    return "".join(reasoning for reasoning, _ in found), "".join(content for _, content in found)


@pytest.mark.parametrize(("text", "place", "reasoning", "content"), TEXTS)
def test_reasoning_is_told_from_the_rest_wherever_the_text_is_cut(
    text: str, place: Any, reasoning: str, content: str
) -> None:
    for cuts in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        parser = TaggedReasoning(place, True).parser()
        pieces = [text[start:stop] for start, stop in zip((0, *cuts), (*cuts, len(text)), strict=True)]
        found = [each for number, piece in enumerate(pieces) for each in parser.push(piece, last=number == 2)]
        assert joined(found) == (reasoning, content), pieces
        assert parser.ended != parser.inside
    parser, found = TaggedReasoning(place, True).parser(), []
    for number, character in enumerate(text, 1):
        found += parser.push(character, last=number == len(text))
    assert joined(found) == (reasoning, content)


def test_only_some_models_end_their_reasoning_with_a_call() -> None:
    assert TagParser("inside", ends_at_call=False).push(f"a{CALL}", last=True) == [(f"a{CALL}", "")]


@pytest.mark.parametrize("character", ["€", " ", "<"])
@pytest.mark.parametrize("place", ["before", "inside"])
def test_the_work_for_a_text_grows_with_its_length(place: Any, character: str) -> None:
    def cpu_s(length: int) -> float:
        parser, began = TagParser(place, ends_at_call=True), time.process_time()
        found = [each for _ in range(length) for each in parser.push(character, last=False)]
        found += parser.push("", last=True)
        assert sum(len(reasoning) + len(content) for reasoning, content in found) == length
        return time.process_time() - began

    # 20 if it grows with the length, 400 with its square; one try of three shows it
    assert any(cpu_s(100_000) / cpu_s(5_000) < 60 for _ in range(3))


QWEN3 = "{{- '<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }} <tool_call>"
R1 = "{% set content = content.split('</think>')[-1] %}"


def test_the_format_is_the_templates() -> None:
    def found(template: str, name: str = "auto", prompt: str = "<assistant>") -> Reasoning | None:
        return reasoning_of(name, template, prompt)

    assert found(QWEN3) == TaggedReasoning("before", True)
    assert found(R1) == TaggedReasoning("before", False)
    assert found("{{ messages }} <think>") is None
    assert found("") is None
    for other in ("[THINK]x[/THINK]", "<seed:think></seed:think>", "<|channel|>", "<thought></thought>"):
        assert found(R1 + other) is None, "it shows two formats"
    assert found(QWEN3 + "</other>") == TaggedReasoning("before", True)
    assert found(QWEN3, "none") is None
    assert found("", "qwen3") == TaggedReasoning("before", True)
    assert found(QWEN3, "deepseek_r1") == TaggedReasoning("before", False)


def test_a_template_is_searched_in_one_pass() -> None:
    begin = time.process_time()
    assert reasoning_of("auto", R1 + "</" + "think" * 100_000, "") == TaggedReasoning("before", False)
    assert time.process_time() - begin < 1


def test_the_prompt_shows_where_the_answer_begins() -> None:
    def place(prompt: str, continued: str | None = None) -> str:
        found = reasoning_of("auto", QWEN3, prompt, continued)
        assert found is not None
        return found.place

    assert place("<user>Say <think><assistant>") == "before"
    assert place("<user>Hi<assistant><think>\n") == "inside"
    assert place("<user>Hi<assistant><think>\n\n</think>\n\n") == "behind"
    assert place("<assistant>An answer", "An answer") == "behind"
    assert place("<assistant><think>I have", "<think>I have") == "inside"
    assert place("<assistant><think>a</think>b", "<think>a</think>b") == "behind"


def test_a_form_begins_behind_the_reasoning() -> None:
    form = StructuredOutputs("regex", "a")
    assert TaggedReasoning("before", False).before(form) == ("regex", "a", "<think>", "</think>", "")
    assert TaggedReasoning("inside", False).before(form) == ("regex", "a", "", "</think>", "")
    assert TaggedReasoning("behind", False).before(form) == form


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"MEDUSA_REASONING_PARSER.*auto, deepseek_r1, openai_gptoss, qwen3, none"):
        from_env({"MEDUSA_REASONING_PARSER": "qwen4"})


def ask(client: openai.OpenAI, say: str, *, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    return client.chat.completions.create(
        model="words", messages=[{"role": "user", "content": f"say:{say}"}], extra_body=extra, **options
    )


def streamed(client: openai.OpenAI, say: str, **options: Any) -> list[tuple[str, str, str, str | None]]:
    """The reasoning, content, names of called functions and finish reason of each choice."""
    found: dict[int, list[Any]] = {}
    for chunk in ask(client, say, stream=True, **options):
        for choice in chunk.choices:
            own = found.setdefault(choice.index, ["", "", "", None])
            own[0] += getattr(choice.delta, "reasoning", None) or ""
            own[1] += choice.delta.content or ""
            own[2] += "".join(call.function.name or "" for call in choice.delta.tool_calls or [])
            own[3] = choice.finish_reason or own[3]
    return [tuple(found[index]) for index in sorted(found)]


OPEN = {"chat_template_kwargs": {"thinking": True}}
CLOSED = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("say", "extra", "reasoning", "content"),
    [
        ("<think>\nI add.\n</think>\n\nFour.", {}, "\nI add.\n", "\n\nFour."),
        ("I add.</think>Four.", OPEN, "I add.", "Four."),
        ("Four.", {}, None, "Four."),
        ("Four.", CLOSED, None, "Four."),
        ("I add, and", OPEN, "I add, and", None),
        ("I add.</think>", OPEN, "I add.", None),
        ("a</think>b", {}, None, "a</think>b"),
        ("<think>I add.</think>Four.", {"include_reasoning": False}, None, "Four."),
        ("<think>I add.</think>Four.", {"reasoning_effort": "none"}, None, "<think>I add.</think>Four."),
    ],
)
def test_a_chat_has_its_reasoning_beside_its_content(
    client: openai.OpenAI, say: str, extra: dict[str, Any], reasoning: str | None, content: str | None
) -> None:
    message = ask(client, say, extra=extra).choices[0].message
    assert (message.reasoning, message.content) == (reasoning, content)
    assert streamed(client, say, extra=extra) == [(reasoning or "", content or "", "", "stop")]
    several = ask(client, say, extra=extra, n=3).choices
    assert [(each.message.reasoning, each.message.content) for each in several] == [(reasoning, content)] * 3
    assert streamed(client, say, extra=extra, n=3) == [(reasoning or "", content or "", "", "stop")] * 3


def test_tokens_of_the_reasoning_are_counted(client: openai.OpenAI) -> None:
    say = "one two </think>abc"  # in tokens of three characters
    used = ask(client, say, extra=OPEN).usage
    assert used.completion_tokens == 7
    assert used.completion_tokens_details.reasoning_tokens == 5
    *_, last = ask(client, say, extra=OPEN, stream=True, stream_options={"include_usage": True})
    assert last.usage == used
    assert ask(client, "abc", extra=CLOSED).usage.completion_tokens_details.reasoning_tokens == 0


def test_log_probabilities_are_those_of_all_tokens_or_hidden_with_the_reasoning(client: openai.OpenAI) -> None:
    say, hidden = "I add.</think>Four.", OPEN | {"include_reasoning": False}
    assert (
        "".join(token.token for token in ask(client, say, extra=OPEN, logprobs=True).choices[0].logprobs.content) == say
    )
    chunks = list(ask(client, say, extra=OPEN, logprobs=True, stream=True))
    tokens = [
        token.token
        for chunk in chunks
        for token in (chunk.choices[0].logprobs or []) and chunk.choices[0].logprobs.content
    ]
    assert "".join(tokens) == say
    assert ask(client, say, extra=hidden, logprobs=True).choices[0].logprobs is None
    shown, unseen = (ask(client, say, extra=extra | {"return_token_ids": True}) for extra in (OPEN, hidden))
    assert shown.choices[0].token_ids
    assert "token_ids" not in unseen.model_dump_json()
    assert {chunk.choices[0].logprobs for chunk in ask(client, say, extra=hidden, logprobs=True, stream=True)} == {None}


@pytest.mark.parametrize(
    ("say", "reasoning", "content", "names"),
    [
        (f"<think>Which?</think>\n{CALL}", "Which?", None, ["time"]),
        (f"<think>Which?\n{CALL}", "Which?\n", None, ["time"]),
        (f"<think>Perhaps {CALL[:11]} or not.</think>Hm.", "Perhaps ", "<tool_call> or not.</think>Hm.", []),
        (f"<think>No.</think>Well. {CALL}", "No.", "Well.", ["time"]),
    ],
)
def test_calls_are_looked_for_behind_the_reasoning(
    client: openai.OpenAI, say: str, reasoning: str, content: str | None, names: list[str]
) -> None:
    choice = ask(client, say, tools=[TIME]).choices[0]
    assert (choice.message.reasoning, choice.message.content) == (reasoning, content)
    assert [call.function.name for call in choice.message.tool_calls or []] == names
    reason = "tool_calls" if names else "stop"
    assert choice.finish_reason == reason
    assert streamed(client, say, tools=[TIME]) == [(reasoning, content or "", "".join(names), reason)]


def test_the_reasoning_of_earlier_turns_reaches_the_template(client: openai.OpenAI, served: Any) -> None:
    served.prompts()
    for name in ("reasoning", "reasoning_content"):
        messages: Any = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", name: "I thought."},
            {"role": "user", "content": "c"},
        ]
        client.chat.completions.create(model="words", messages=messages)
        messages[1][name] = ["x"]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="words", messages=messages)
        assert refused.value.param == f"messages[1].{name}"
    assert served.prompts() == [repr("<user>a<assistant><think>I thought.</think>b<user>c<assistant>")] * 2


def respond(served: Any, say: str, **body: Any) -> tuple[Response, list[Any]]:
    """The whole response, and the events of its stream."""
    asked = {"input": f"say:{say}", **body}
    status, answer, _ = served.request("POST", "/v1/responses", asked)
    assert status == 200, answer
    raw = served.request("POST", "/v1/responses", asked | {"stream": True})[1]
    lines = [line for line in raw.decode().split("\n") if line.startswith("data: ")]
    events = [EVENTS.validate_json(line.removeprefix("data: "), strict=True) for line in lines]
    return Response.model_validate(answer, strict=True), events


def test_a_response_has_an_item_of_the_reasoning(served: Any) -> None:
    whole, events = respond(served, "I add.</think>Four.", **OPEN)
    reasoning, message = whole.output
    assert (reasoning.type, message.type, whole.output_text) == ("reasoning", "message", "Four.")
    assert [part.text for part in reasoning.content] == ["I add."]  # type: ignore[union-attr]
    assert (reasoning.status, reasoning.summary) == ("completed", [])  # type: ignore[union-attr]
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 4  # the first two of the tag's, too
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "I add."
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    assert {event.item_id for event in events if event.type.startswith("response.reasoning_text")} == {
        events[-1].response.output[0].id
    }
    assert events[-1].response.output_text == "Four."


def test_a_response_may_leave_its_reasoning_out(served: Any) -> None:
    whole, events = respond(served, "I add.</think>Four.", include_reasoning=False, **OPEN)
    assert [item.type for item in whole.output] == [item.type for item in events[-1].response.output] == ["message"]
    assert not any("reasoning_text" in event.type for event in events)


def test_a_response_that_only_reasons_has_no_message(served: Any) -> None:
    whole, events = respond(served, "I add, and", **OPEN)
    assert [item.type for item in whole.output] == [item.type for item in events[-1].response.output] == ["reasoning"]


def test_the_tokens_of_a_responses_text_are_not_those_of_its_reasoning(served: Any) -> None:
    for say, extra in (("I add.</think>Four.", OPEN), ("<think>I add.</think>Four.", {}), ("  Four.", {})):
        whole, events = respond(served, say, include=["message.output_text.logprobs"], **extra)
        for found in (whole, events[-1].response):
            tokens = "".join(token.token for token in found.output[-1].content[0].logprobs)
            assert found.output_text.endswith(tokens)
            assert len(tokens) > len(found.output_text) - 3  # a token that ends the reasoning may begin the text


def test_a_response_calls_behind_its_reasoning(served: Any) -> None:
    tool = {"type": "function", "name": "time", "parameters": None, "strict": None}
    whole, events = respond(served, f"<think>Which?</think>\n{CALL}", tools=[tool])
    assert [item.type for item in whole.output] == ["reasoning", "function_call"]
    assert [item.type for item in events[-1].response.output] == ["reasoning", "function_call"]


def test_items_of_reasoning_belong_to_the_answer_behind_them(served: Any) -> None:
    served.prompts()
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed", "encrypted_content": None}
    call = {"type": "function_call", "call_id": "x", "name": "time", "arguments": "{}"}
    items = [
        {"role": "user", "content": "a"},
        reasoning | {"content": [{"type": "reasoning_text", "text": "First"}]},
        {"role": "assistant", "content": "b"},
        call,
        {"type": "function_call_output", "call_id": "x", "output": "9"},
        reasoning | {"summary": [{"type": "summary_text", "text": "Then"}]},
        call | {"call_id": "y"},
        {"type": "function_call_output", "call_id": "y", "output": "10"},
        reasoning,
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert served.request("POST", "/v1/responses", {"input": items})[0] == 200
    assert served.prompts() == [
        repr(
            "<user>a<assistant><think>First</think>b[time]<tool>9<assistant><think>Then</think>[time]<tool>10"
            "<assistant>c<user>d<assistant>"
        )
    ]


def test_reasoning_stays_in_the_content_if_the_operator_wants_that(serve: Callable[..., Any]) -> None:
    served = serve(files={"chat_template.jinja": TEMPLATE}, reasoning_parser="none")
    served.wait_ready()
    body = {"messages": [{"role": "user", "content": "say:<think>a</think>b"}]}
    answer = served.request("POST", "/v1/chat/completions", body)[1]
    assert answer["choices"][0]["message"]["content"] == "<think>a</think>b"
    assert answer["choices"][0]["message"]["reasoning"] is None
    assert "completion_tokens_details" not in answer["usage"]


def test_an_engine_with_a_server_of_its_own_tells_reasoning_by_its_own_parser(serve: Callable[..., Any]) -> None:
    answer = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n{"from": "vllm"}'
    with ScriptedServer(lambda head: answer) as server:
        served = serve(http_port=server.port, files={"chat_template.jinja": TEMPLATE})
        served.wait_ready()
        body = {"messages": [{"role": "user", "content": "say:<think>a</think>b"}]}
        ours = served.request("POST", "/v1/chat/completions", body | {"include_reasoning": True})[1]
        assert ours["choices"][0]["message"]["content"] == "<think>a</think>b"
        hidden = json.dumps(body | {"include_reasoning": False}).encode() + b"\r\n\r\n"  # the server reads up to here
        theirs = served.request("POST", "/v1/chat/completions", hidden)[1]
        assert theirs == {"from": "vllm"}
