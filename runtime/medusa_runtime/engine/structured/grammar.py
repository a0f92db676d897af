"""Compiles a requested form into a grammar of llguidance, a library that only the grammars' process imports."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..base import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

PARAM = "structured_outputs"  # what a request calls its form
KINDS = ("json_schema", "regex", "choice", "grammar")
COMPILED = "llguidance"  # the kind of a grammar that has been compiled already
# Enough for indentation, but limited, so that a model that repeats spaces cannot go on forever.
_WHITESPACE = r"( ?|\r?\n[ \t]{0,40})"


def compile_grammar(form: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    """Return the grammar of llguidance, which has not been checked yet. Raises ValueError if there can be none."""
    grammar = _compile(form)
    return _behind_free_text(grammar, form, tokenizer) if form.closing else grammar


def _compile(form: StructuredOutputs) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind, text = form.kind, form.text
    if kind == COMPILED:
        return text
    if kind == "json_schema":
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise ValueError("expected an object")
        if isinstance(schema, bool):
            schema = {} if schema else {"anyOf": [False]}  # options belong to objects
        return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE}))
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


def _from_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _behind_free_text(grammar: str, form: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    """Return a grammar of free text up to the closing tag, and then of what ``grammar`` says."""
    first, *others = json.loads(grammar)["grammars"]
    if _is_token(form.closing, tokenizer):
        start, free = f"free {form.closing} @form", "free: /(?s:.*)/"
    else:
        start, free = "free @form", f"free[suffix={_literal(form.closing)}]: /(?s:.*)/"
    if form.opening:
        opening = form.opening if _is_token(form.opening, tokenizer) else _literal(form.opening)
        start = f"@form | {opening} {start}"
    return json.dumps({"grammars": [{"lark_grammar": f"start: {start}\n{free}\n"}, first | {"name": "form"}, *others]})


def _is_token(tag: str, tokenizer: LLTokenizer) -> bool:
    """Return whether a tag is one token that llguidance takes for a special one, so that it is no text in grammars."""
    tokens = tokenizer.tokenize_str(tag, parse_special=True)
    return len(tokens) == 1 and tokenizer.is_special_token(tokens[0])


def _literal(text: str) -> str:
    """Return a Lark string literal. Lark's escapes include those of JSON."""
    return json.dumps(text, ensure_ascii=False)
