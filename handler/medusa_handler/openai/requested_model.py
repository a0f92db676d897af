"""The model that a request asks for: the served one, or an adapter of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa_runtime.engine.serving.model_name import accepted_names
from medusa_runtime.errors import json_excerpt, printable

from ..faults import ApiError
from .body.parameters import Body

if TYPE_CHECKING:
    from ..service import Service


def check_model(service: Service, body: Body) -> str:
    """Return the name of the model or adapter that the body asks for. Raises ApiError 404 if it names another one."""
    asked = body.get("model")
    if asked in (None, "", service.model.name, service.settings.model, *accepted_names(service.settings)):
        return service.model.name
    if isinstance(asked, str) and asked in service.model.adapters:
        return asked
    names = ", ".join(map(json_excerpt, (service.model.name, *service.model.adapters.urls())))
    raise ApiError(
        404,
        f"the model {json_excerpt(asked)} does not exist; this server has {printable(names)}",
        param="model",
        code="model_not_found",
    )


def adapter_of(service: Service, model: str) -> str | None:
    """Return the adapter of a model's name, as ``check_model`` returns it; None for the base model."""
    return model if model != service.model.name and model in service.model.adapters else None


__all__ = ["adapter_of", "check_model"]
