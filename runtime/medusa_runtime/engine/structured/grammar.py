"""What was asked for → a grammar of llguidance. Only the process of the grammars imports this package's library."""

from __future__ import annotations

import json

from ..base import StructuredOutputs

KINDS = ("json_schema", "regex", "choice", "grammar")
COMPILED = "llguidance"  # a kind, too: what others have compiled
# Enough to indent by, and not so much that a model which repeats spaces never ends.
_WHITESPACE = r"( ?|\r?\n[ \t]{0,40})"


def compiled(asked: StructuredOutputs) -> str:
    """The grammar, not yet checked. Raises ValueError with a reason for what cannot be one."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind, text = asked
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
    """A string of Lark, which knows JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)
