"""The form of a text, read from ``structured_outputs`` as vLLM's clients write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from medusa_runtime.engine.base import StructuredOutputs
from medusa_runtime.errors import shown

from ..faults import ApiError

FORMS = ("json", "json_object", "regex", "choice", "grammar")
_OBJECT = '{"type": "object"}'


def form_of(value: Any, name: str = "structured_outputs") -> StructuredOutputs | None:
    """Return the one form in an object like ``{"regex": "[a-z]+"}``; None if it has none.

    ``name`` is the object's field, for the error. Raises ApiError 400.
    """
    if not isinstance(value, Mapping):
        raise _invalid(name, f"an object with one of {', '.join(FORMS)}", value)
    given = {key: form for key, form in value.items() if form is not None and form is not False}
    for key in given:
        if key not in FORMS:
            raise _invalid(f"{name}.{key}", f"one of {', '.join(FORMS)}, which are supported", given[key])
    if not given:
        return None
    if len(given) > 1:
        raise _invalid(name, "one form", sorted(given))
    [(key, form)] = given.items()
    return _form(key, form, f"{name}.{key}")


def json_schema(schema: Any, name: str) -> StructuredOutputs:
    """Return the form of a JSON schema, given as object, boolean or text. Raises ApiError 400."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise _invalid(name, "a JSON schema", schema) from None
    if not isinstance(schema, Mapping | bool):
        raise _invalid(name, "a JSON schema", schema)
    return StructuredOutputs("json_schema", json.dumps(schema, ensure_ascii=False))


def json_object() -> StructuredOutputs:
    return StructuredOutputs("json_schema", _OBJECT)


def _form(key: str, form: Any, name: str) -> StructuredOutputs:
    if key == "json":
        return json_schema(form, name)
    if key == "json_object":
        if form is not True:
            raise _invalid(name, "true or false", form)
        return json_object()
    if key == "choice":
        if not isinstance(form, list) or not form or not all(isinstance(item, str) and item for item in form):
            raise _invalid(name, "a list of texts, none of them empty", form)
        return StructuredOutputs("choice", json.dumps(form, ensure_ascii=False))
    if not isinstance(form, str) or not form:
        raise _invalid(name, "text that is not empty", form)
    return StructuredOutputs(key, form)


def _invalid(name: str, expected: str, found: Any) -> ApiError:
    return ApiError(400, f"{name}: expected {expected}, found {shown(found)}", param=name, code="invalid_value")
