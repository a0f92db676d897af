"""Tool calls by a hostile model, or one whose caller made it write so: any text, and a lot of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_handler.faults import ApiError
from medusa_handler.openai.tools.choice import tools_of
from medusa_handler.openai.tools.formats import (
    ForcedCallsParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
    NamedCallParser,
    ToolParser,
)

NAMES = frozenset(("f", "g"))
PARSERS: tuple[Callable[[], ToolParser], ...] = (
    HermesParser,
    MistralParser,
    lambda: Llama3Parser(NAMES),
    ForcedCallsParser,
    lambda: NamedCallParser("f"),
)
PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{", "}", "[", "]", '"',
    ":", ",", ";", "\\", " ", "\n", '"name"', '"arguments"', '"parameters"', "f", "1", "\\ud800", "é", "null", "<",
]  # fmt: skip
MARKERS = {"<tool_call>": HermesParser, "[TOOL_CALLS]": MistralParser, "": lambda: Llama3Parser(NAMES)}
SECONDS = 2.0  # of CPU time; a tenth of it is needed


def read(make: Callable[[], ToolParser], text: str, step: int) -> tuple[str, list[list[str]]]:
    parser, content, calls = make(), "", []
    for found in [*(parser.push(text[at : at + step]) for at in range(0, len(text), step)), parser.finish()]:
        content += found.content
        for call in found.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[call.number][1] += call.arguments
    return content, calls


def test_fuzzed_text_of_a_model() -> None:
    """No text breaks a parser, makes a difference by the pieces in which it comes, or is lost if it has no call."""

    def check(data: bytes) -> None:
        text = data.decode(errors="replace")
        for make in PARSERS:
            assert read(make, text, 1) == read(make, text, 7)
        for make in PARSERS[:3]:
            content, calls = read(make, text, 7)
            assert calls or content == text

    seeds = [
        b'<tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>',
        b'[TOOL_CALLS][{"name": "f", "arguments": {}}] [TOOL_CALLS]g{"a": 1}',
        b'<|python_tag|>{"name": "f", "parameters": {"a": "}"}}; {"name": "g", "parameters": {}}',
    ]
    fuzz(st.lists(st.sampled_from(PIECES), max_size=30).map("".join).map(str.encode), check, seeds)


@pytest.mark.parametrize(
    "text",
    [
        " " * 100_000,
        "\n" * 100_000 + "x",
        '{"name": "f", "arguments": {"a": "' + "x" * 100_000,
        '{"arguments": {"a": "' + "x" * 100_000 + '"}, "name": "f"}',
        '{"x": ' + "[" * 100_000,
        '{"' + "x" * 100_000,
        "f" * 100_000,
        '{"name": "f", "arguments": {}},' * 3_000,
        "<" * 100_000,
    ],
    ids=range(9),
)
@pytest.mark.parametrize("step", [4, 1 << 20])
def test_time_grows_with_the_text_and_not_with_its_square(text: str, step: int) -> None:
    for marker, make in MARKERS.items():
        began = time.thread_time()
        read(make, marker + text, step)
        assert time.thread_time() - began < SECONDS, marker


def test_fuzzed_tools_of_a_caller() -> None:
    """Tools and a choice are taken, or refused with 400; the form that they force can be made."""

    statuses = {400}

    def check(data: bytes) -> None:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(body, dict):
            return
        try:
            tools_of(body).output_constraint(None)
        except ApiError as error:
            statuses.add(error.status)

    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/b"}}}}}
    named = {"type": "function", "function": {"name": "f"}}
    seeds = [
        json.dumps({"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}).encode()
        for choice in ("auto", "required", "none", named)
    ]
    fuzz(st.binary(max_size=40), check, seeds)
    assert statuses == {400}
