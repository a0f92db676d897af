"""Structural tags as grammars of llguidance: they allow what xgrammar, whose tags they are, allows."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from engine_fixtures import byte_level_tokenizer
from vllm_installed import vllm_is_installed

if not vllm_is_installed():
    pytest.skip("needs vLLM", allow_module_level=True)

import llguidance
import xgrammar
from medusa_vllm.structural_tags import special_tokens, translate
from xgrammar.testing import _is_grammar_accept_string

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]
PARAMETERS = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "c": {"enum": ["red", "blue"]}},
    "required": ["s"],
    "additionalProperties": False,
}
TEXT = {"type": "any_text"}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"s": "<tool_call>", "n": 3}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"s": "x"}}'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"s": "a"}<|tool_call_end|><|tool_calls_section_end|>'
)
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=s>\na<b\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
    "<parameter=c>\nred\n</parameter>\n</function>\n</tool_call>"
)
DEEPSEEK = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="s" string="true">a</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
GLM = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>"
HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"s": "a"}<|end|>'
)


def schema_grammar(schema: dict[str, Any]) -> str:
    return str(llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": True}))


def accepts(tag: dict[str, Any], text: str, tokenizer: Any = None) -> bool:
    tokenizer = tokenizer or byte_level_tokenizer()
    grammar = translate(json.dumps(tag), schema_grammar, special_tokens(tokenizer.to_str().encode()))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokenizer.to_str()), grammar, log_level=0)
    assert not matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def of_model(name: str, choice: str) -> dict[str, Any]:
    import vllm.parser.harmony  # noqa: F401 - registers its tag
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

    function = {"name": "f", "strict": True, "parameters": PARAMETERS}
    tools = [ChatCompletionToolsParam(type="function", function=function)]
    tag = get_model_structural_tag(name, tools, choice, reasoning=False)
    assert tag is not None
    return dict(tag.model_dump())


@pytest.mark.parametrize(
    ("model", "call"),
    [("hermes", HERMES), ("llama", LLAMA), ("kimi", KIMI), ("qwen_3_coder", QWEN), ("deepseek_v3_2", DEEPSEEK),
     ("glm_4_7", GLM), ("harmony", HARMONY)],
)  # fmt: skip
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_calls_that_vllm_forces_are_those_that_xgrammar_allows(model: str, call: str, choice: str) -> None:
    tag = of_model(model, choice)
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tag))
    begin = call[: call.index("f") + 1]
    others = ["", "hi", call[:-1], begin, f"{begin} no", f"hi {call}", call + call, f"{call} hi {call}",
              f"hi {call} hi", call.replace("5", "five"), call.replace('"a"', "5"), call.replace("red", "pink"),
              ]  # fmt: skip
    assert accepts(tag, call)
    assert [(text, accepts(tag, text)) for text in others] == [
        (text, _is_grammar_accept_string(grammar, text)) for text in others
    ]


@pytest.mark.parametrize("special", [False, True])
def test_a_tag_of_one_token_is_that_token(special: bool) -> None:
    tokenizer = byte_level_tokenizer()
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(["<tool_call>", "</tool_call>", "[CALL]"])
    call = HERMES.replace('"<tool_call>"', '"x"')
    assert accepts(of_model("hermes", "required"), call + call, tokenizer)
    assert accepts(of_model("hermes", "auto"), f"a <tool {call} b", tokenizer)
    assert not accepts(of_model("hermes", "auto"), "a <tool_call> b", tokenizer)
    other = tagged(begin="[CALL]", content=TEXT, end="</tool_call>")
    assert accepts(other, "[CALL]hi</tool_call>", tokenizer)
    assert not accepts(other, "[CALL]hi", tokenizer)


def whole(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def tagged(**parts: Any) -> dict[str, Any]:
    return whole({"type": "tag"} | parts)


def digits(**options: Any) -> dict[str, Any]:
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</a>"}
    return {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag], **options}


FIVE = {"type": "const_string", "value": "5"}
XML = {
    "type": "json_schema",
    "style": "qwen_xml",
    "json_schema": {
        "$defs": {"d": {"enum": ["x", 1]}},
        "properties": {
            "d": {"$ref": "#/$defs/d"},
            "u": {"type": ["string", "null"]},
            "l": {"type": "array", "items": {"type": "integer"}},
        },
    },
}
D, U, L = "<parameter=d>x</parameter>", "<parameter=u>any</parameter>", "<parameter=l>\n[1, 2]\n</parameter>"
THOUGHT = {"type": "tag", "begin": "<t>", "content": TEXT, "end": "</t>"}
FORMATS: list[tuple[dict[str, Any], list[str]]] = [
    (digits(), ["", "x", "x<", "<a", "<a>1</a>", "x<a>1</a> <a>22</a>y", "<a>x", "<a>1</a><a>"]),
    (digits(at_least_one=True), ["", "x", "<a>1</a>", "<a>1</a>x", "<a>1</a>x<a>2</a>", "x<a>1</a>"]),
    (digits(stop_after_first=True), ["", "x", "x<a>1</a>", "<a>1</a>x"]),
    (digits(stop_after_first=True, at_least_one=True), ["", "x", "<a>1</a>", "<a>1</a>x", "<a>1</a><a>1</a>"]),
    (digits(excludes=["no", "n't"]), ["", "n", "not", "nn't", "n<a>1</a>o"]),
    (THOUGHT | {"content": digits()}, ["<t>x</t>", "<t>x<a>1</a></t>", "<t><a>1</a></t>", "<t>x", "<t><a>1</a>x"]),
    (THOUGHT | {"end": [">", "!"]}, ["<t>a>", "<t>a!", "<t>", "<t>!", "<t>a>b", "<t>a!b>"]),
    (THOUGHT | {"content": {"type": "or", "elements": [TEXT, FIVE]}}, ["<t>5</t>", "<t>x</t>", "<t>", "<t></t>"]),
    ({"type": "sequence", "elements": [{"type": "optional", "content": THOUGHT}, TEXT]}, ["<t>a</t>b", "b", ""]),
    ({"type": "tags_with_separator", "separator": ", ", "tags": digits()["tags"]},
     ["", "<a>1</a>", "<a>1</a>, <a>2</a>", "<a>1</a><a>1</a>"]),
    ({"type": "repeat", "min": 2, "max": 3, "content": FIVE}, ["5", "55", "555", "5555"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": FIVE}, ["5", "55", "5555"]),
    ({"type": "star", "content": FIVE}, ["", "55", "56"]),
    ({"type": "plus", "content": FIVE}, ["", "55"]),
    ({"type": "any_text", "max_chars": 3}, ["", "abc", "abcd"]),
    ({"type": "dispatch", "rules": [["<a>", FIVE], ["<b>", {"type": "regex", "pattern": "x/\\/y"}]], "excludes": ["z"]},
     ["", "<a>5", "q<a>5r<b>x//yz", "q<a>5r<b>x//yw", "<a>2"]),
    ({"type": "grammar", "grammar": 'root ::= "a" | "b" root'}, ["a", "ba", "b", "bba"]),
    ({"type": "json_schema", "json_schema": True}, ['"x"', "[1]", "x"]),
    (XML, ["", "\n", D, D.replace("x", "1"), D.replace("x", "2"), U, f"{D}\n{L}\n", D + U + L, L + D,
           L.replace("1", "x")]),
    (XML | {"json_schema": True}, ["", "<parameter=x>y</parameter>\n<parameter=y>1</parameter>", "x"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "texts"), FORMATS)
def test_a_format_allows_what_xgrammar_allows(form: dict[str, Any], texts: list[str]) -> None:
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps(whole(form)))
    assert [(text, accepts(whole(form), text)) for text in texts] == [
        (text, _is_grammar_accept_string(grammar, text)) for text in texts
    ]


def test_the_older_form_is_read_too() -> None:
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": {"enum": [1]}, "end": "</a>"}],
        "triggers": ["<a"],
    }
    assert accepts(older, "hi <a>1</a> hi")
    assert not accepts(older, "hi <a>2</a>")


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ([], "."),
        ({}, "."),
        (whole({"type": "nothing"}), "."),
        (whole({"type": "exclude_token"}), "exclude_token has no form .* --structured-outputs-config.backend xgrammar"),
        (whole({"type": "any_text", "max_tokens": 3}), "any_text with such a limit"),
        (whole({"type": "json_schema", "json_schema": {}, "style": "cohere_xml"}), "style cohere_xml"),
        (whole({"type": "token", "token": "<nothing>"}), "special token"),
        (whole({"type": "sequence", "elements": [TEXT, {"type": "regex", "pattern": "a"}]}), "must end at a string"),
        (whole(digits(triggers=["<b"])), "begin with one of the triggers"),
        (whole({"type": "tags_with_separator", "separator": "", "tags": []}), "found none"),
    ],
)
def test_what_has_no_form_is_refused(tag: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accepts(tag, "")


REPEATED = {
    "$defs": {"d": {"enum": ["x" * 300_000]}},
    "properties": {f"p{number}": {"type": "integer"} for number in range(3000)},
}


def nested(**options: Any) -> dict[str, Any]:
    """A tag in tags, each of which is written twice."""
    form: dict[str, Any] = {"type": "const_string", "value": "x" * 1000}
    for _ in range(18):
        form = digits(**options) | {"tags": [{"type": "tag", "begin": "<a>", "content": form, "end": "</a>"}]}
    return form


@pytest.mark.parametrize(
    "form",
    [
        nested(at_least_one=True),
        nested(triggers=["<", "<a"]),
        XML | {"json_schema": REPEATED},
    ],
)
def test_a_small_tag_does_not_become_a_huge_grammar(form: dict[str, Any]) -> None:
    began = time.thread_time()
    with pytest.raises(ValueError, match="too large"):
        translate(json.dumps(whole(form)), schema_grammar, {})
    assert time.thread_time() - began < 3
