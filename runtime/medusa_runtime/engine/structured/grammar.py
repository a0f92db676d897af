"""Compiles a requested form into a grammar of llguidance, a library that only the grammars' process imports."""

from __future__ import annotations

import json

from ..base import StructuredOutputs

PARAM = "structured_outputs"  # what a request calls its form
KINDS = ("json_schema", "regex", "choice", "grammar")
COMPILED = "llguidance"  # the kind of a grammar that has been compiled already
# Enough for indentation, but limited, so that a model that repeats spaces cannot go on forever.
_WHITESPACE = r"( ?|\r?\n[ \t]{0,40})"


def compile_grammar(form: StructuredOutputs) -> str:
    """Return the grammar of llguidance, which has not been checked yet. Raises ValueError if there can be none."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind, text = form
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
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(_literal(choice) for choice in json.loads(text))))
    if kind == "grammar":
        try:
            return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
        except Exception as error:
            raise ValueError(str(error)) from error
    raise ValueError(f"expected one of {', '.join(KINDS)}, found {kind}")


def _literal(text: str) -> str:
    """Return a Lark string literal. Lark's escapes include those of JSON."""
    return json.dumps(text, ensure_ascii=False)
