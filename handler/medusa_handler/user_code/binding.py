"""The arguments of a user's function: what each parameter is given, according to its annotation or name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, get_origin

from medusa_runtime.errors import HandlerLoadError

from ..cloud_event import is_cloud_event_class, refusal
from ..contract import Context, HttpError, Request
from .loader import PRIVATE_MODULE

Resolve = Callable[[Request], Any]
_MOST_PROBLEMS = 1000


class InvalidBodyError(HttpError):
    """The error for a body that does not fit the declared type. ``fields``: [{"field": "a.b", "message": …}]."""

    def __init__(self, status: int, message: str, fields: list[dict[str, str]]) -> None:
        super().__init__(status, message)
        self.fields = fields


class Binding:
    """A function's arguments, made from a request. Raises HandlerLoadError for a signature that cannot be served."""

    def __init__(self, function: Callable[..., Any], context: Context) -> None:
        name = getattr(function, "__qualname__", repr(function))
        try:
            parameters = list(inspect.signature(function, eval_str=True).parameters.values())
        except NameError as error:
            raise HandlerLoadError(f"{name}: an annotation cannot be resolved: {error}") from error
        except (TypeError, ValueError):  # a callable without a signature takes the request
            parameters = [inspect.Parameter("request", inspect.Parameter.POSITIONAL_ONLY)]
        self.is_event_style = [parameter.name for parameter in parameters[:2]] == ["event", "context"]
        self._positional: list[Resolve] = []
        self._named: dict[str, Resolve] = {}
        for parameter in parameters:
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                continue
            resolve = _resolver(parameter, context, name)
            if resolve is None:
                continue
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                self._positional.append(resolve)
            else:
                self._named[parameter.name] = resolve

    def arguments(self, request: Request) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and named arguments. Raises HttpError 400 or 422 if the body does not fit."""
        named = {name: resolve(request) for name, resolve in self._named.items()}
        return [resolve(request) for resolve in self._positional], named


def _resolver(parameter: inspect.Parameter, context: Context, name: str) -> Resolve | None:
    kind = parameter.annotation
    if kind is Context or (kind is inspect.Parameter.empty and parameter.name == "context"):
        return lambda request: context
    if kind is Request:
        return lambda request: request
    if kind is inspect.Parameter.empty or kind is Any:
        return (lambda request: request) if parameter.default is inspect.Parameter.empty else None
    if kind is bytes:
        return lambda request: request.body
    if kind is str:
        return lambda request: request.text
    if is_cloud_event_class(kind):
        return lambda request: _cloud_event(kind, request)
    if hasattr(kind, "model_validate_json"):
        return lambda request: _validate(kind.model_validate_json, request)
    if kind in (dict, list) or get_origin(kind) is not None or dataclasses.is_dataclass(kind):
        return _type_adapter(kind, name, parameter.name)
    if parameter.default is not inspect.Parameter.empty:
        return None
    raise HandlerLoadError(
        f"{name}: cannot fill {parameter.name!r} of type {_shown(kind)}; expected no annotation, Request, Context, "
        "dict, list, str, bytes, a dataclass, a pydantic model or CloudEvent"
    )


def _type_adapter(kind: Any, name: str, parameter: str) -> Resolve:
    try:
        from pydantic import TypeAdapter  # 75 ms, and only where types are declared
    except ImportError:
        raise HandlerLoadError(
            f"{name}: to validate {parameter!r} as {_shown(kind)} pydantic is needed: "
            "pip install 'medusa-runtime[typed]'"
        ) from None
    adapter = TypeAdapter(kind)
    return lambda request: _validate(adapter.validate_json, request)


def _shown(kind: Any) -> str:
    """Return an annotation as the user wrote it: ``int``, ``Order``, ``list[Order]``."""
    return re.sub(rf"{PRIVATE_MODULE}[^.]+\.", "", inspect.formatannotation(kind))


def _validate(validate: Callable[[bytes], Any], request: Request) -> Any:
    from pydantic import ValidationError

    if b"NaN" in request.body or b"Infinity" in request.body:  # pydantic takes these numbers, which JSON does not have
        request.json  # noqa: B018 raises HttpError 400 unless they stand in text
    try:
        return validate(request.body)
    except ValidationError as error:
        if (count := error.error_count()) > _MOST_PROBLEMS:  # to describe each may take a hundred times the body
            text = f"the body does not fit in {count:,} places, more than are described ({_MOST_PROBLEMS})"
            raise InvalidBodyError(422, text, []) from None
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        if any(problem["type"] == "json_invalid" for problem in problems):
            raise HttpError(400, f"expected a JSON body: {problems[0]['msg']}") from None
        fields = [{"field": ".".join(map(str, p["loc"])) or "body", "message": str(p["msg"])} for p in problems]
        problems_text = "; ".join(f"{entry['field']}: {entry['message']}" for entry in fields)
        raise InvalidBodyError(422, f"the body does not fit: {problems_text}", fields) from None


def _cloud_event(kind: Any, request: Request) -> Any:
    """Return the event in the request, binary or structured, in the class of the package's version (1.x or 2.x)."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    try:
        if kind.__module__.startswith("cloudevents.core"):
            from cloudevents.core.bindings.http import HTTPMessage, from_http_event

            return from_http_event(HTTPMessage(headers=headers, body=request.body))
        package = importlib.import_module(kind.__module__.rpartition(".")[0])
        return package.from_http(headers, request.body)
    except Exception as error:  # noqa: BLE001 the package's own errors, none of them the server's fault
        raise HttpError(400, f"expected a CloudEvent{refusal(error)}") from None
