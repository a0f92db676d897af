"""Compiles a requested form into a grammar of llguidance, a library that only the grammars' process imports."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ..base import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

PARAM = "structured_outputs"  # what a request calls its form
KINDS = ("json_schema", "regex", "choice", "grammar")
COMPILED = "llguidance"  # the kind of a grammar that has been compiled already
# Enough for indentation, but limited, so that a model that repeats spaces cannot go on forever.
_PART = re.compile(r"(<[^<>\s]+>)")  # of a tag: what may be a special token
_WHITESPACE = r"( ?|\r?\n[ \t]{0,40})"


def compile_grammar(form: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    """Return the grammar of llguidance, which has not been checked yet. Raises ValueError if there can be none."""
    grammar = _compile(form, tokenizer)
    return _behind_tags(grammar, form, tokenizer) if form.closing or form.header else grammar


def _compile(form: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind, text = form.kind, form.text
    if kind == COMPILED:
        return text
    if kind == "json_schema":
        return _from_schema(json.loads(text))
    if kind == "tagged_json":
        return _from_tagged_schemas(json.loads(text), tokenizer)
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "choice":
        return _from_lark("start: " + " | ".join(_literal(choice) for choice in json.loads(text)))
    if kind == "grammar":
        try:
            return _from_lark(any_to_lark(text))
        except Exception as error:
            raise ValueError(str(error)) from error
    raise ValueError(f"expected one of {', '.join(KINDS)}, found {kind}")


def _from_schema(schema: object) -> str:
    from llguidance import LLMatcher

    if not isinstance(schema, dict | bool):
        raise ValueError("expected an object")  # noqa: TRY004 - what all faults of forms are
    if isinstance(schema, bool):
        schema = {} if schema else {"anyOf": [False]}  # options belong to objects
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE}))


def _from_tagged_schemas(tagged: list[tuple[str, object]], tokenizer: LLTokenizer) -> str:
    starts, grammars = [], []
    for number, (tag, schema) in enumerate(tagged):
        [grammar] = json.loads(_from_schema(schema))["grammars"]
        grammars.append(grammar | {"name": f"json{number}"})
        starts.append(" ".join([*_tag(tag, tokenizer), f"@json{number}"]))
    return json.dumps({"grammars": [{"lark_grammar": "start: " + " | ".join(starts)}, *grammars]})


def _from_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _behind_tags(grammar: str, form: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    """Return a grammar of free text up to the closing tag, if there is one, and then of what ``grammar`` says."""
    first, *others = json.loads(grammar)["grammars"]
    begin = " ".join([*_tag(form.header, tokenizer), "@form"])
    start, free = begin, ""
    if form.closing:
        end, *behind = _tag(form.closing, tokenizer)
        if end.startswith("<"):
            start, free = " ".join(["free", end, *behind, begin]), "free: /(?s:.*)/"
        else:
            start, free = " ".join(["free", *behind, begin]), f"free[suffix={end}]: /(?s:.*)/"
    if form.opening:
        start = f"{begin} | {' '.join(_tag(form.opening, tokenizer))} {start}"
    return json.dumps({"grammars": [{"lark_grammar": f"start: {start}\n{free}\n"}, first | {"name": "form"}, *others]})


def _tag(tag: str, tokenizer: LLTokenizer) -> list[str]:
    """Return the parts of a tag as Lark writes them. A special token is no text in grammars."""
    parts = filter(None, _PART.split(tag))
    return [part if _is_token(part, tokenizer) else _literal(part) for part in parts]


def _is_token(tag: str, tokenizer: LLTokenizer) -> bool:
    """Return whether a text is one token that llguidance takes for a special one."""
    tokens = tokenizer.tokenize_str(tag, parse_special=True)
    return len(tokens) == 1 and tokenizer.is_special_token(tokens[0])


def _literal(text: str) -> str:
    """Return a Lark string literal. Lark's escapes include those of JSON."""
    return json.dumps(text, ensure_ascii=False)
