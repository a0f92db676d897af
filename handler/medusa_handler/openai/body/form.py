"""The form that a body asks its answer to have: ``response_format``, or vLLM's ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from medusa_runtime.engine.base import StructuredOutputs

from ...model.structured_outputs import form_of, json_object, json_schema
from .parameters import Body, invalid

_EXPECTED = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": …}}'


class Form(NamedTuple):
    """A form, and the field of the body that asked for it."""

    asked: StructuredOutputs
    field: str


def form(body: Body) -> Form | None:
    """Return the form that a body asks for; None if any text will do. Raises ApiError 400."""
    wanted = body.get("structured_outputs")
    structured = None if wanted is None else form_of(wanted)
    formatted = _response_format(body)
    if structured is not None and formatted is not None:
        raise invalid("structured_outputs", "no response_format with it", wanted)
    if structured is not None:
        return Form(structured, "structured_outputs")
    return None if formatted is None else Form(formatted, "response_format")


def _response_format(body: Body) -> StructuredOutputs | None:
    given = body.get("response_format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object()
    if kind != "json_schema":
        raise invalid("response_format", _EXPECTED, given)
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if schema is None:
        raise invalid("response_format.json_schema", '{"name": …, "schema": …}', described)
    return json_schema(schema, "response_format.json_schema.schema")
