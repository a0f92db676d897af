"""A strict check of an AWS call's parameters against the service's own model (botocore's JSON).

boto3 itself checks types and minima. It leaves maxima, patterns and enumerations to the service, which answers late.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from medusa_runtime.errors import ConfigError


def check_call(service: str, operation: str, parameters: Mapping[str, Any]) -> None:
    """Raise ConfigError, which lists every parameter that the service would refuse. Needs botocore, but no network."""
    model = _described(service).operation_model(operation)
    found = list(_problems(model.input_shape, parameters, ""))
    if found:
        raise ConfigError(f"{service} {operation}: " + "; ".join(found))


@functools.cache  # a command makes several calls of a service, whose model is megabytes of JSON
def _described(service: str) -> Any:
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    # Not through a session, which would look for a profile and a region.
    return ServiceModel(Loader().load_service_model(service, "service-2"), service)


def _problems(shape: Any, value: Any, where: str) -> Iterator[str]:
    kind = shape.type_name
    if kind == "structure":
        yield from _structure_problems(shape, value, where)
    elif kind == "list":
        if not isinstance(value, list | tuple):
            yield f"{where}: expected a list, found {value!r}"
            return
        yield from _range_problems(shape, len(value), f"{where} (entries)")
        for number, item in enumerate(value):
            yield from _problems(shape.member, item, f"{where}[{number}]")
    elif kind == "map":
        if not isinstance(value, dict):
            yield f"{where}: expected a map, found {value!r}"
            return
        yield from _range_problems(shape, len(value), f"{where} (entries)")
        for key, item in value.items():
            yield from _problems(shape.key, key, f"{where}.{key}")
            yield from _problems(shape.value, item, f"{where}.{key}")
    elif kind == "string":
        yield from _string_problems(shape, value, where)
    elif kind in ("integer", "long", "float", "double"):
        if isinstance(value, bool) or not isinstance(value, int | float if kind in ("float", "double") else int):
            yield f"{where}: expected a number, found {value!r}"
        else:
            yield from _range_problems(shape, value, where)
    elif kind == "boolean" and not isinstance(value, bool):
        yield f"{where}: expected true or false, found {value!r}"


def _structure_problems(shape: Any, value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: expected fields, found {value!r}"
        return
    for name in sorted(set(shape.required_members) - set(value)):
        yield f"{_at(where, name)} is missing"
    for name, item in value.items():
        if name in shape.members:
            yield from _problems(shape.members[name], item, _at(where, name))
        else:
            yield f"{_at(where, name)} is unknown"


def _string_problems(shape: Any, value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, str):
        yield f"{where}: expected text, found {value!r}"
        return
    if shape.enum and value not in shape.enum:
        shown = ", ".join(shape.enum) if len(shape.enum) <= 8 else f"one of the {len(shape.enum)} that AWS lists"
        yield f"{where}={value!r}: expected {shown}"
    pattern = shape.metadata.get("pattern")
    if pattern and not _fits(pattern, value):
        yield f"{where}={value!r}: expected the form {pattern}"
    yield from _range_problems(shape, len(value), f"{where} (characters)")


def _fits(pattern: str, value: str) -> bool:
    """Return whether the value fits. A pattern that Python cannot read (they are Java's) is left to the service."""
    try:
        return re.fullmatch(pattern, value) is not None
    except re.error:
        return True


def _range_problems(shape: Any, number: float, where: str) -> Iterator[str]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if (low is not None and number < low) or (high is not None and number > high):
        yield f"{where}={number:g}: expected {'' if low is None else low} to {'' if high is None else high}"


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
