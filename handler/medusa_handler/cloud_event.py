"""The classes and errors of the package cloudevents, told apart without importing it."""

from __future__ import annotations

import json


def is_cloud_event_class(kind: object) -> bool:
    """Return whether ``kind`` is a class of the package cloudevents, in any of its versions."""
    module = getattr(kind, "__module__", "")
    return isinstance(module, str) and module.split(".")[0] == "cloudevents"


def refusal(error: Exception) -> str:
    """Say, as the end of a message, what the package did not take as an event."""
    attributes = getattr(error, "errors", None)  # of its CloudEventValidationError: problems by attribute
    if isinstance(attributes, dict) and attributes:
        return f", found one without a valid {' and '.join(map(str, attributes))}"
    if isinstance(error, json.JSONDecodeError):
        return f", found invalid JSON at line {error.lineno}, column {error.colno}"
    return f": {error}" if is_cloud_event_class(type(error)) else ", found something else"
