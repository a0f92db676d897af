"""Translates structural tags, with which vLLM has models call tools, into grammars of llguidance.

A structural tag says where text is free, what opens a form in it, and what closes it. vLLM writes one for a forced
call and for strict tools, and callers may send their own. It is xgrammar's format, and vLLM's backend for llguidance
knows only an older one.

A grammar of llguidance is read token by token, and where free text may end, it must end at something that is no text:
a special token, or a string that the text cannot contain. So free text and the string behind it become one lazy lexeme.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from .xml_parameters import STYLES, PropertyKind, XmlStyle, property_kind

_OTHER_BACKEND = "; vLLM's other backend may know it: --structured-outputs-config.backend xgrammar"

_EMPTY = '""'
_SPACE = r"[ \n\r\t]*"
_ANY_NAME = "[a-zA-Z_][a-zA-Z0-9_]*"
_MOST_CHARACTERS = 4 << 20
_PART_CHARACTERS = 100  # what a part is counted as, at least


class _Text(NamedTuple):
    """Free text, without some strings, and of limited length unless ``most`` is None."""

    excludes: tuple[str, ...] = ()
    most: int | None = None


class _Literal(NamedTuple):
    """One of some strings."""

    choices: tuple[str, ...]


class _Choice(NamedTuple):
    """One of some sequences."""

    sequences: list[list[_Part]]


class _Expression(NamedTuple):
    """An expression in llguidance's dialect of Lark, which neither begins nor ends with free text."""

    lark: str


class _Space(NamedTuple):
    """White space that may be there."""


class _Name(NamedTuple):
    """The name of a property, or any name."""

    name: str | None


_Part: TypeAlias = _Text | _Space | _Literal | _Choice | _Expression


def translate(tag: str, schema_grammar: Callable[[dict[str, Any]], str], special_tokens: Mapping[str, int]) -> str:
    """Return the grammar for a structural tag, which is JSON. Raises ValueError if there is none.

    ``schema_grammar`` returns the grammar of a JSON schema. ``special_tokens`` are the numbers of the tokens that are
    no text to llguidance, by name.
    """
    from xgrammar import StructuralTag

    found = json.loads(tag)
    if isinstance(found, dict) and "structures" in found:  # as they were before xgrammar had formats
        tags = [
            {"type": "tag", "begin": each["begin"], "end": each["end"],
             "content": {"type": "json_schema", "json_schema": each["schema"] or {}}}
            for each in found["structures"]
        ]  # fmt: skip
        found = {"type": "structural_tag",
                 "format": {"type": "triggered_tags", "triggers": found["triggers"], "tags": tags}}  # fmt: skip
    return _Translation(schema_grammar, special_tokens).grammar(StructuralTag.model_validate(found).format)


def special_tokens(tokenizer: bytes | None) -> dict[str, int]:
    """Return the numbers of the tokens that are no text to llguidance, by name, from a tokenizer.json.

    An added token is none if it is special, or in angle brackets.
    """
    added = json.loads(tokenizer or b"{}").get("added_tokens") or ()
    return {
        token["content"]: token["id"]
        for token in added
        if token.get("special") or (token["content"].startswith("<") and token["content"].endswith(">"))
    }


class _Translation:
    """The rules and grammars that the parts of one tag need."""

    def __init__(self, schema_grammar: Callable[[dict[str, Any]], str], special_tokens: Mapping[str, int]) -> None:
        self._schema_grammar = schema_grammar
        self._special = special_tokens
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) + ")")
        self._rules: dict[str, str] = {}  # by what they say: a rule's name
        self._grammars: dict[str, str] = {}
        self._others: list[dict[str, Any]] = []
        self._size = 0

    def grammar(self, tag_format: Any) -> str:
        start = self._emit(self._parts(tag_format), last=True)
        lark = "\n".join([f"start: {start or _EMPTY}", *(f"{name}{rule}" for rule, name in self._rules.items())])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._others]})

    def _spend(self, size: int) -> None:
        """Count what is written. A part may be written more than once, and tags in tags more often still."""
        self._size += size
        if self._size > _MOST_CHARACTERS:
            raise ValueError("the structural tag is too large; expected a simpler one")

    def _parts(self, part: Any) -> list[_Part]:
        """Return a format as a sequence of parts."""
        self._spend(_PART_CHARACTERS)
        kind = part.type
        if kind == "const_string":
            return _literal(part.value)
        if kind == "any_text" and part.max_tokens is None:
            return [_Text(tuple(part.excludes), part.max_chars)]
        if kind == "json_schema" and not part.excludes:
            return self._schema(part.json_schema, part.style)
        if kind == "qwen_xml_parameter":
            return self._schema(part.json_schema, "qwen_xml")
        if kind == "regex":
            return [_Expression(self._rule(f": {_regex(part.pattern)}"))]
        if kind == "grammar":
            return [_Expression(self._named({"lark_grammar": _lark(part.grammar)}))]
        if kind == "token":
            return [_Expression(self._token(part.token))]
        if kind == "sequence":
            return [each for element in part.elements for each in self._parts(element)]
        if kind == "or":
            return [_Choice([self._parts(element) for element in part.elements])]
        if kind == "optional":
            return [_Choice([self._parts(part.content), []])]
        if kind in ("star", "plus", "repeat"):
            repeated = self._emit(self._parts(part.content), last=False)
            return [_Expression(f"({repeated or _EMPTY}){_times(part)}")]
        if kind == "tag":
            return [*self._edge(part.begin), *self._parts(part.content), *self._edge(part.end)]
        if kind == "tags_with_separator":
            return self._separated(part)
        if kind == "triggered_tags":
            rules = [
                (trigger, [self._after(trigger, tag) for tag in part.tags if tag.begin.startswith(trigger)])
                for trigger in part.triggers
            ]
            if sum(len(found) for _, found in rules) < len(part.tags):
                raise ValueError(f"expected each tag to begin with one of the triggers {part.triggers}")
            if part.at_least_one:
                first = _Choice([self._parts(tag) for tag in part.tags])
                return [first] if part.stop_after_first else [first, *self._dispatched(rules, part.excludes, loop=True)]
            return self._dispatched(rules, part.excludes, loop=not part.stop_after_first)
        if kind == "dispatch":
            dispatched = [(pattern, [self._parts(content)]) for pattern, content in part.rules]
            return self._dispatched(dispatched, part.excludes, loop=part.loop)
        limit = " with such a limit" if kind in ("any_text", "json_schema") else ""
        raise ValueError(f"a structural tag's format {kind}{limit} has no form in llguidance{_OTHER_BACKEND}")

    def _edge(self, edge: Any) -> list[_Part]:
        """Return what begins or ends a tag: a string, one of some strings, or a token."""
        if isinstance(edge, str):
            return _literal(edge)
        if isinstance(edge, list):
            return [_Literal(tuple(edge))] if all(edge) else [_Choice([_literal(each) for each in edge])]
        return [_Expression(self._token(edge.token))]

    def _after(self, trigger: str, tag: Any) -> list[_Part]:
        """Return the parts of a tag behind its trigger."""
        return [*_literal(tag.begin[len(trigger) :]), *self._parts(tag.content), *self._edge(tag.end)]

    def _separated(self, part: Any) -> list[_Part]:
        tags = self._rule(f": {self._emit([_Choice([self._parts(tag) for tag in part.tags])], last=False)}")
        more = "" if part.stop_after_first else f" ({self._string(part.separator)} {tags})*"
        return [_Expression(f"({tags}{more}){'' if part.at_least_one else '?'}")]

    def _dispatched(
        self, rules: list[tuple[str, list[list[_Part]]]], excludes: Iterable[str], *, loop: bool
    ) -> list[_Part]:
        """Return free text in which a pattern opens what follows it; with ``loop``, any number of times."""
        patterns = [pattern for pattern, follow in rules if follow]
        text = _Text((*excludes, *patterns))
        opened: list[list[_Part]] = [[text, *_literal(pattern), _Choice(follow)] for pattern, follow in rules if follow]
        if not loop:
            return [_Choice([*opened, [text]])]
        return [_Expression(f"({self._emit([_Choice(opened)], last=False)})*"), text] if opened else [text]

    def _emit(self, parts: list[_Part], *, last: bool) -> str:
        """Return a sequence's expression. With ``last`` nothing comes behind it, so that it may end with free text."""
        words: list[str] = []
        left = list(parts)
        while left:
            part = left.pop(0)
            following = left[0] if left else None
            if isinstance(part, _Expression):
                words.append(part.lark)
            elif isinstance(part, _Literal):
                words.append(_one_of(self._string(each) for each in part.choices))
            elif isinstance(part, _Choice):
                sequences = part.sequences
                if isinstance(following, _Literal) and any(map(_ends_with_text, sequences)):
                    sequences = [[*each, left[0]] for each in sequences]
                    del left[0]
                alone = last and not left
                words.append(_one_of(self._emit(each, last=alone) or _EMPTY for each in sequences))
            elif isinstance(part, _Space):
                if isinstance(following, _Literal):
                    words.append(_one_of(self._spelled(None, each) for each in following.choices))
                    del left[0]
                elif isinstance(following, _Choice):
                    left[0] = _Choice([[part, *each] for each in following.sequences])
                else:
                    words.append(self._spelled(None))
            elif following is None and last:
                words.append(self._rule(f": {self._text(part)}"))
            elif isinstance(following, _Literal):
                words.append(_one_of(self._text_until(part, each) for each in following.choices))
                del left[0]
            elif isinstance(following, _Choice):
                left[0] = _Choice([[part, *each] for each in following.sequences])
            elif isinstance(following, _Expression) and following.lark.startswith("<["):
                words.append(self._rule(f": {self._text(part)}"))
            else:
                raise ValueError(f"free text in a structural tag must end at a string or a token{_OTHER_BACKEND}")
        return " ".join(words)

    def _text_until(self, text: _Text, end: str) -> str:
        """Return the expression for free text and the string behind it, the first one that comes."""
        self._spend(len(end))
        before, *others = [each for each in self._split.split(end) if each] if self._special else [end]
        if before in self._special:
            return f"{self._rule(f': {self._text(text)}')} {self._string(end)}"
        lexeme = self._rule(f"[lazy]: {self._text(text)} {_quoted(before)}")
        return " ".join([lexeme, *map(self._string, others)])

    def _text(self, text: _Text) -> str:
        """Return the name of a terminal that matches free text."""
        self._spend(sum(map(len, text.excludes)))
        length = "*" if text.most is None else f"{{0,{text.most}}}"
        without = f"/(?s:.*)({'|'.join(map(_escaped, text.excludes))})(?s:.*)/"
        rule = f": /(?s:.{length})/" + (f" & ~{without}" if text.excludes else "")
        return self._rules.setdefault(rule, f"TEXT_{len(self._rules)}")

    def _string(self, text: str) -> str:
        """Return the expression for a string, in which special tokens stand for themselves."""
        self._spend(len(text))
        pieces = self._split.split(text) if self._special else [text]
        words = [self._token(each) if each in self._special else _quoted(each) for each in pieces if each]
        return " ".join(words) or _EMPTY

    def _token(self, token: int | str) -> str:
        number = token if isinstance(token, int) else self._special.get(token)
        if number is None:
            raise ValueError(f"expected a special token of the tokenizer, found {token!r}")
        return f"<[{number}]>"

    def _rule(self, rule: str) -> str:
        return self._rules.setdefault(rule, f"rule_{len(self._rules)}")

    def _json(self, schema: dict[str, Any]) -> str:
        (grammar,) = json.loads(self._schema_grammar(schema))["grammars"]
        return self._named(grammar)

    def _named(self, grammar: dict[str, Any]) -> str:
        """Return a reference to a grammar, the same one for the same grammar: tags often say it twice."""
        text = json.dumps(grammar)
        self._spend(len(text))
        if text not in self._grammars:
            self._grammars[text] = f"form_{len(self._grammars)}"
            self._others.append({**grammar, "name": self._grammars[text]})
        return f"@{self._grammars[text]}"

    def _schema(self, schema: dict[str, Any] | bool, style: str) -> list[_Part]:
        """Return a schema's values as JSON, or an object's properties as XML."""
        if isinstance(schema, bool):
            schema = {} if schema else {"anyOf": [False]}
        if style == "json":
            return [_Expression(self._json(schema))]
        if style not in STYLES:
            raise ValueError(f"a structural tag's style {style} has no form in llguidance{_OTHER_BACKEND}")
        return self._parameters(schema, STYLES[style])

    def _parameters(self, schema: dict[str, Any], style: XmlStyle) -> list[_Part]:
        """Return an object whose properties follow each other in the order of the schema."""
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            value = self._value({}, PropertyKind(strings=True, choices=(), others=True), style, None)
            return [_Expression(f"({value})*"), _Space()]
        required = schema.get("required")
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        words = []
        for name, value in properties.items():
            inner = {**shared, **value} if isinstance(value, dict) else {}
            word = f"({self._value(inner, property_kind(inner), style, name)})"
            words.append(word if isinstance(required, list) and name in required else f"{word}?")
        return [_Expression(" ".join(words)), _Space()]

    def _value(self, schema: dict[str, Any], kind: PropertyKind, style: XmlStyle, name: str | None) -> str:
        """Return the expression for a property: its name, or any name, and its value."""
        words = []
        if kind.strings:
            begin = self._spelled(None, style.before_name, _Name(name), *style.before_string)
            if kind.choices:
                words += [f"{begin} {self._spelled(None, each, None, style.end)}" for each in kind.choices]
            else:
                words.append(f"{begin} {self._text_until(_Text(), style.end)}")
        if kind.others and (not kind.strings or kind.choices or style.before_json != style.before_string):
            begin = self._spelled(None, style.before_name, _Name(name), *style.before_json, None)
            words.append(f"{begin} {self._json(schema)} {self._spelled(None, style.end)}")
        return _one_of(words)

    def _spelled(self, *pieces: str | _Name | None) -> str:
        """Return the expression for pieces of text, with white space that may be there for each None.

        White space is of one lexeme with the text around it: alone, it could not be told from what else begins so.
        """
        words, pattern = [], ""
        for piece in pieces:
            if piece is None:
                pattern += _SPACE
            elif isinstance(piece, _Name) and piece.name is None:
                pattern += _ANY_NAME
            else:
                text = piece if isinstance(piece, str) else str(piece.name)
                self._spend(len(text))
                for each in self._split.split(text) if self._special else [text]:
                    if each in self._special:
                        words += [*self._lexeme(pattern), self._token(each)]
                        pattern = ""
                    else:
                        pattern += _escaped(each)
        return " ".join([*words, *self._lexeme(pattern)])

    def _lexeme(self, pattern: str) -> list[str]:
        return [self._rule(f": /{pattern}/") + ("?" if pattern == _SPACE else "")] if pattern else []


def _literal(text: str) -> list[_Part]:
    return [_Literal((text,))] if text else []


def _ends_with_text(parts: list[_Part]) -> bool:
    last = parts[-1] if parts else None
    return isinstance(last, _Text) or (isinstance(last, _Choice) and any(map(_ends_with_text, last.sequences)))


def _one_of(words: Iterable[str]) -> str:
    found = list(words)
    if not found:
        raise ValueError("expected one tag or more in a structural tag, found none")
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def _times(part: Any) -> str:
    if part.type == "repeat":
        return f"{{{part.min},{'' if part.max == -1 else part.max}}}"
    return {"star": "*", "plus": "+"}[part.type]


def _quoted(text: str) -> str:
    """Return a Lark string literal. Lark's escapes include those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return a regular expression that matches a string."""
    return "".join(each if each.isalnum() or ord(each) > 127 else f"\\x{ord(each):02x}" for each in text)


def _regex(pattern: str) -> str:
    """Return a Lark regular expression."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL)
    return f"/{escaped}/".replace("\n", "\\n")


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    return str(any_to_lark(grammar))
