"""Hundreds of JSON schemas: each answer is valid, and a schema that cannot be followed exactly is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.engine.base import StructuredOutputs
from medusa_runtime.errors import RequestError

pytest.importorskip("llguidance", reason="structured outputs need llguidance")
SUITE = json.loads(Path(__file__).with_name("json_schema_suite.json").read_text())["cases"]
_BATCH = 8

LEAVES: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 12},
    {"type": "string", "enum": ["red", "green", 'quoted "blue"', "naïve"]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -5, "maximum": 130},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, None]}},
    {"type": ["string", "null"], "maxLength": 3},
    {"anyOf": [{"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}, {"enum": ["none"]}]},
]


def made_up(seed: int) -> dict[str, Any]:
    """A schema as APIs have them: objects in objects, optional fields, bounded lists, definitions."""
    dice = random.Random(seed)

    def schema(depth: int) -> dict[str, Any]:
        kind = dice.choice(("object", "object", "array", "leaf", "ref") if depth else ("leaf", "ref"))
        if kind == "ref":
            return {"$ref": "#/$defs/leaf"}
        if kind == "leaf":
            return dice.choice(LEAVES)
        if kind == "array":
            return {"type": "array", "items": schema(depth - 1), "minItems": dice.randint(0, 1), "maxItems": 3}
        names = [f"field{number}" for number in range(dice.randint(1, 4))]
        properties = {name: schema(depth - 1) for name in names}
        required = [name for name in names if dice.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return {**schema(3), "$defs": {"leaf": dice.choice(LEAVES)}}


def closing(served: Any) -> dict[int, float]:
    """A bias towards what ends a value, as these weights know of no JSON and would seldom end one."""
    pieces = {number: served.engine.detokenize([number]) for number in range(served.engine.info.vocab_size)}
    biases = {'"': 40.0, "</s>": 40.0, "<|end|>": 40.0, "@": 20.0, ":": 18.0, "a": 16.0, "]": 12.0, "}": 12.0}
    return {number: biases[text] for number, text in pieces.items() if text in biases}


def answers(served: Any, schemas: list[Any]) -> tuple[list[tuple[Any, str]], list[tuple[Any, str]]]:
    """The schemas with their answers, and those that were refused with the reason."""
    bias, found, refused = closing(served), [], []
    for start in range(0, len(schemas), _BATCH):
        running = []
        for number, schema in enumerate(schemas[start : start + _BATCH]):
            form = StructuredOutputs("json_schema", json.dumps(schema))
            options = {"logit_bias": bias, "temperature": 1.0, "seed": start + number, "max_tokens": 400}
            try:
                asked = served.ask([5, 6, 7], structured_outputs=form, ignore_eos=False, **options)
            except RequestError as error:
                refused.append((schema, str(error)))
            else:
                running.append((schema, asked))
        for schema, asked in running:
            assert asked.last.finish_reason == "stop", (schema, asked.text)
            found.append((schema, asked.text))
    return found, refused


def check(found: list[tuple[Any, str]]) -> None:
    from jsonschema import Draft202012Validator

    for schema, text in found:
        checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        problems = [error.message for error in checker.iter_errors(json.loads(text))]
        assert not problems, (schema, text, problems)


@pytest.mark.slow
def test_answers_to_the_schemas_of_the_test_suite(serve: Any) -> None:
    found, refused = answers(serve(), [schema for _, _, schema, _ in SUITE])
    check(found)
    assert len(found) >= 150
    for schema, reason in refused:
        assert "this json_schema cannot be used: " in reason, schema


@pytest.mark.slow
def test_answers_to_schemas_as_apis_have_them(serve: Any) -> None:
    found, refused = answers(serve(), [made_up(seed) for seed in range(80)])
    assert not refused
    check(found)


def test_nothing_invalid_is_allowed() -> None:
    """Every instance that the suite calls invalid is refused by the grammar, token by token."""
    from engine_fixtures import byte_level_tokenizer
    from llguidance import LLMatcher, LLTokenizer
    from medusa_runtime.engine.structured.grammar import compile_grammar

    tokenizer = LLTokenizer(byte_level_tokenizer().to_str())
    checked = 0
    for file, description, schema, instances in SUITE:
        try:
            grammar = compile_grammar(StructuredOutputs("json_schema", json.dumps(schema)), tokenizer)
        except ValueError:
            continue
        fresh = LLMatcher(tokenizer, grammar, log_level=0)
        if fresh.is_error():
            continue
        for instance in instances:
            matcher = fresh.deep_copy()
            taken = matcher.consume_tokens(tokenizer.tokenize_str(json.dumps(instance, ensure_ascii=False)))
            assert not (taken and matcher.is_accepting()), (file, description, instance)
            checked += 1
    assert checked > 200
