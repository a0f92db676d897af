"""Constraints on a generated text, read from ``structured_outputs`` as vLLM's clients write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from medusa_runtime.bounded_json import parse_json
from medusa_runtime.engine.base import StructuredOutputs

from ..faults import invalid, unsupported

KINDS = ("json", "json_object", "regex", "choice", "grammar")
_MOST_VALUES = 200_000  # in a schema that comes as text
_FIELD = "structured_outputs"
_OBJECT = '{"type": "object"}'


def parse_structured_outputs(value: Any) -> StructuredOutputs | None:
    """Return the one constraint in an object like ``{"regex": "[a-z]+"}``; None if it has none.

    Raises ApiError 400.
    """
    if not isinstance(value, Mapping):
        raise invalid(_FIELD, f"an object with one of {', '.join(KINDS)}", value)
    constraints = {key: each for key, each in value.items() if each is not None and each is not False}
    for key in constraints:
        if key not in KINDS:
            raise unsupported(f"{_FIELD}.{key}", f"one of {', '.join(KINDS)}, which are supported", constraints[key])
    if not constraints:
        return None
    if len(constraints) > 1:
        raise invalid(_FIELD, "one constraint", sorted(constraints))
    [(key, constraint)] = constraints.items()
    return _structured_outputs(key, constraint, f"{_FIELD}.{key}")


def json_schema(schema: Any, name: str) -> StructuredOutputs:
    """Return the constraint of a JSON schema: an object, a boolean, or either as text. Raises ApiError 400."""
    if isinstance(schema, str):
        try:
            schema = parse_json(schema, _MOST_VALUES)
        except (ValueError, RecursionError):
            raise invalid(name, "a JSON schema", schema) from None
    if not isinstance(schema, Mapping | bool):
        raise invalid(name, "a JSON schema", schema)
    return StructuredOutputs("json_schema", json.dumps(schema, ensure_ascii=False))


def json_object() -> StructuredOutputs:
    return StructuredOutputs("json_schema", _OBJECT)


def _structured_outputs(key: str, value: Any, name: str) -> StructuredOutputs:
    if key == "json":
        return json_schema(value, name)
    if key == "json_object":
        if value is not True:
            raise invalid(name, "true or false", value)
        return json_object()
    if key == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise invalid(name, "a list of texts, none of them empty", value)
        return StructuredOutputs("choice", json.dumps(value, ensure_ascii=False))
    if not isinstance(value, str) or not value:
        raise invalid(name, "text that is not empty", value)
    return StructuredOutputs(key, value)
