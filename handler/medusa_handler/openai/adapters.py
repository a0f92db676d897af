"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, and the adapters among /v1/models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flask import Response
from medusa_runtime.config import ADAPTER_NAME
from medusa_runtime.errors import RequestError
from medusa_runtime.storage.base import redacted

from ..faults import ApiError, invalid
from .body import fields, parameters
from .body.parameters import Body

if TYPE_CHECKING:
    from ..service import Service

_LOAD = frozenset(("lora_name", "lora_path", "load_inplace"))
_UNLOAD = frozenset(("lora_name", "lora_int_id"))


def adapter_models(service: Service) -> list[dict[str, Any]]:
    """Return the adapters as /v1/models lists them, with the base model as their parent."""
    base = service.model.name
    return [model_entry(service, name, redacted(url), base) for name, url in service.model.adapters.urls().items()]


def model_entry(
    service: Service, name: str, root: str, parent: str | None = None, max_model_len: int | None = None
) -> dict[str, Any]:
    """Return a model as /v1/models lists it, in vLLM's form."""
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "medusa-runtime",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }


def load_adapter(service: Service, body: Body, is_disconnected: Callable[[], bool]) -> Response:
    """Load an adapter, and answer when it can be used. Raises ApiError 403 unless the operator allows its location."""
    fields.check_fields(body, _LOAD)
    name, url = _text(body, "lora_name"), _text(body, "lora_path")
    inplace = parameters.flag(body, "load_inplace")
    _check_allowed(service, url)
    if not ADAPTER_NAME.fullmatch(name) or name == service.model.name:
        raise invalid("lora_name", "letters, digits and .:/_-, and not the name of the base model", name)
    adapters, engine = service.model.adapters, service.engine
    assert engine is not None
    entry, previous = adapters.add(name, url, replace=inplace)
    wait_check = service.model.wait_check(is_disconnected)
    try:
        lease = adapters.acquire(name, wait_check, entry)
        try:
            engine.wait_adapter(name, wait_check)
        finally:
            lease.close()
    except BaseException as error:
        adapters.undo_add(entry, previous)
        if isinstance(error, RequestError | ApiError):
            error.param = "lora_path"
        raise
    return Response(f"Success: LoRA adapter '{name}' added successfully.", content_type="text/plain")


def unload_adapter(service: Service, body: Body) -> Response:
    """Forget an adapter. Requests that use it continue."""
    fields.check_fields(body, _UNLOAD)
    name = _text(body, "lora_name")
    if service.settings.allow_lora is None:
        raise _forbidden("--allow-lora PREFIX", "lora_name")
    service.model.adapters.remove(name)
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", content_type="text/plain")


def _check_allowed(service: Service, url: str) -> None:
    from medusa_runtime.state.trust import place_of  # only this route needs it
    from medusa_runtime.storage.canonical_urls import is_below

    allowed = (service.settings.allow_lora or "").split(",")
    place = place_of(url)
    if place is None or not any(prefix and is_below(place, place_of(prefix) or "") for prefix in allowed):
        raise _forbidden(f"--allow-lora={redacted(place or url)}", "lora_path")


def _forbidden(flag: str, param: str) -> ApiError:
    return ApiError(
        403,
        f"adapters are not loaded by requests here; the operator allows it with {flag} (MEDUSA_ALLOW_LORA)",
        param=param,
        code="not_allowed",
    )


def _text(body: Body, name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(name, "text", value)
    return value


__all__ = ["adapter_models", "load_adapter", "model_entry", "unload_adapter"]
