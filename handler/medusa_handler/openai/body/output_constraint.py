"""The constraint that a body puts on its answer's text: ``response_format``, or vLLM's ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from medusa_runtime.engine.base import StructuredOutputs

from ...faults import invalid, unsupported
from ...model.structured_outputs import json_object, json_schema, parse_structured_outputs
from .fields import REFUSED_TEXT, TEXT, check_inner_fields, inner_object
from .parameters import Body

_EXPECTED = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": …}}'

_EXPECTED_FORMAT = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": …, "schema": …}'
_FORMAT = frozenset(("type", "name", "schema", "strict", "description"))


class OutputConstraint(NamedTuple):
    """A constraint on an answer's text, and the field of the body that asked for it."""

    outputs: StructuredOutputs
    field: str


def output_constraint(body: Body) -> OutputConstraint | None:
    """Return the constraint in a body; None if any text will do. Raises ApiError 400."""
    return _one_constraint(body, _response_format(body), "response_format")


def text_constraint(body: Body) -> OutputConstraint | None:
    """Return the constraint in a body of /v1/responses, as ``output_constraint`` does. Raises ApiError 400."""
    return _one_constraint(body, _text_format(body), "text.format")


def _one_constraint(body: Body, formatted: StructuredOutputs | None, field: str) -> OutputConstraint | None:
    value = body.get("structured_outputs")
    structured = None if value is None else parse_structured_outputs(value)
    if structured is not None and formatted is not None:
        raise invalid("structured_outputs", f"no {field} with it", value)
    if structured is not None:
        return OutputConstraint(structured, "structured_outputs")
    return None if formatted is None else OutputConstraint(formatted, field)


def _text_format(body: Body) -> StructuredOutputs | None:
    text = inner_object(body, "text", TEXT, REFUSED_TEXT)
    value = None if text is None else text.get("format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid("text.format", _EXPECTED_FORMAT, value)
    check_inner_fields(value, "text.format", _FORMAT if kind == "json_schema" else frozenset(("type",)))
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object()
    if not isinstance(value.get("name"), str):
        raise invalid("text.format.name", "text", value.get("name"))
    return json_schema(value.get("schema"), "text.format.schema")


def _response_format(body: Body) -> StructuredOutputs | None:
    value = body.get("response_format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object()
    if kind == "structural_tag":
        raise unsupported("response_format", _EXPECTED, value)
    if kind != "json_schema":
        raise invalid("response_format", _EXPECTED, value)
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if schema is None:
        raise invalid("response_format.json_schema", '{"name": …, "schema": …}', described)
    return json_schema(schema, "response_format.json_schema.schema")
