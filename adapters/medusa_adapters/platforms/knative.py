"""Knative: Serving's container contract, and Eventing's data plane (knative/specs, runtime-contract and data-plane).

Any function can receive an event. A parameter of type CloudEvent is given the event itself; other functions get the
event's data as the body, and its attributes in ``ce-`` headers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_handler.contract import Request
    from medusa_handler.platform import Platform
    from medusa_runtime.config import Settings

_STRUCTURED = "application/cloudevents"
_LONGEST_ATTRIBUTE = 8190  # in bytes, as a header of binary mode; a reply's headers hold two of the event's
_MOST_REPLIES = 8
_METHODS = "GET, POST, PUT, PATCH, DELETE, OPTIONS"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {}  # Knative's only variable, PORT, is one of ours, too


def platform(settings: Settings, environ: Mapping[str, str]) -> Platform:
    from medusa_handler.platform import Platform

    source = "/" + (environ.get("K_SERVICE") or "function")

    def send(request: Request, result: Any) -> Any:
        return _reply(request, result, source) if _is_event(request) else result

    allow = "POST, OPTIONS" if settings.handler is None else _METHODS
    return Platform(
        name="knative", preflight=partial(_preflight, allow=allow), translate_request=_receive, translate_result=send
    )


def _preflight(headers: Mapping[str, str], allow: str) -> dict[str, str]:
    """Return the headers of CloudEvents' webhook handshake (http-webhook, section 4): who may deliver, and how."""
    origin = headers.get("WebHook-Request-Origin")
    webhook = {"WebHook-Allowed-Origin": origin, "WebHook-Allowed-Rate": "*"} if origin else {}
    return {"Allow": allow, **webhook}


def _is_event(request: Request) -> bool:
    if request.method != "POST":
        return False
    return "ce-specversion" in request.headers or _mimetype(request).startswith(_STRUCTURED)


def _mimetype(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _receive(request: Request) -> Request:
    """Return a request whose event, if it has one, is in binary mode. Raises HttpError 400, and 415 for a batch."""
    if not _is_event(request):
        return request
    from medusa_handler.cloud_event import refusal
    from medusa_handler.contract import Headers, HttpError

    try:
        from cloudevents.core.bindings.http import HTTPMessage, from_http_event, to_binary_event  # 50 ms
    except ImportError:
        raise HttpError(501, "to take CloudEvents: pip install 'medusa-runtime[cloudevents]' (2.0 or newer)") from None
    if _mimetype(request).startswith(_STRUCTURED + "-batch"):
        raise HttpError(415, "expected one event, binary or structured, found a batch")
    headers = {name.lower(): value for name, value in request.headers.items()}
    try:
        event = from_http_event(HTTPMessage(headers=headers, body=request.body))
        if not _mimetype(request).startswith(_STRUCTURED):
            if _mimetype(request) == "application/json" and request.body:
                json.loads(request.body)  # the package would pass invalid JSON on as text
            return request
        message = to_binary_event(event)
    except Exception as error:  # noqa: BLE001 the package's own errors, and those of its parsers: all mean a bad event
        raise HttpError(400, f"expected a CloudEvent 1.0{refusal(error)}") from None
    if (longest := max(map(len, message.headers.values()))) > _LONGEST_ATTRIBUTE:
        raise HttpError(400, f"expected attributes of at most {_LONGEST_ATTRIBUTE} bytes, found one of {longest}")
    kept = {name: value for name, value in headers.items() if name not in ("content-type", "content-length")}
    return replace(request, headers=Headers({**kept, **message.headers}.items()), body=message.body)


def _reply(request: Request, result: Any, source: str) -> Any:
    """Return the answer to an event: 200 with a reply event, or 202 without one.

    A broker refuses a body that is not an event, so a plain result becomes one. Its id is made from that of the event,
    so that a duplicate event gets a duplicate reply. An event that is such a reply itself gets none, because a trigger
    without a filter would send replies in circles. Nor does one behind which there are many replies already: two
    functions would answer each other for ever.
    """
    from medusa_handler.cloud_event import is_cloud_event_class
    from medusa_handler.contract import Response

    if result is None:
        return Response(status=202)
    if is_cloud_event_class(type(result)) or not isinstance(result, str | bytes | dict | list):
        return result
    kind, asked_by = request.headers.get("ce-type", ""), request.headers.get("ce-source", "")
    if kind.endswith(".reply" * (1 if asked_by == source else _MOST_REPLIES)):
        return Response(status=202)
    headers = {
        "ce-specversion": "1.0",
        "ce-id": request.headers.get("ce-id", request.id) + "-reply",
        "ce-source": source,
        "ce-type": kind + ".reply",
    }
    return result, 200, headers
