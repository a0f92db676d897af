"""KServe: Knative's contract, and KServe's two protocols for functions (kserve.github.io, "Data Plane").

A function is called by ``/v1/models/NAME:predict`` or by ``/v2/models/NAME/infer``, the Open Inference Protocol. Models
answer OpenAI's routes, which KServe's own servers have below ``/openai``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import ConfigError
from medusa_runtime.registry import NO_ENGINE

from . import knative

if TYPE_CHECKING:
    from medusa_handler.platform import Platform, Route
    from medusa_runtime.config import Settings

    from .inference_protocols import InferenceProtocols

MODELS = "/mnt/models"  # where KServe's storage initializer puts what storageUri names
_PREFIX = "/openai"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    meant = knative.variables(environ)
    folder = Path(MODELS)
    if (folder / "config.json").is_file() or next(folder.glob("*.safetensors"), None):
        meant["MEDUSA_MODEL"] = MODELS
    if service := environ.get("K_SERVICE", "").removesuffix("-default").removesuffix("-predictor"):
        meant["MEDUSA_SERVED_MODEL_NAME"] = service  # the InferenceService's name
    return meant


def platform(settings: Settings, environ: Mapping[str, str]) -> Platform:
    from medusa_handler.platform import LIVE, READY, Route
    from medusa_runtime import __version__
    from medusa_runtime.engine.serving.model_name import accepted_names

    from .inference_protocols import InferenceProtocols

    names = accepted_names(settings)
    if wrong := next((name for name in names if set(name) & set("<>")), None):
        raise ConfigError(f"--served-model-name={wrong!r} cannot be used: KServe has it in paths; expected no < and >")
    protocols = InferenceProtocols(names)
    server = {"name": "medusa-runtime", "version": __version__, "extensions": ["binary_tensor_data"]}
    probes = {"/v2/health/live": LIVE, "/v2/health/ready": READY}
    probes |= {f"/v2/models/{name}/ready": READY for name in names}
    routes = [Route("GET", path, lambda _: server) for path in ("/v2", "/v2/")]
    described = ["/v2/models/<path:name>", "/v2/models/<path:name>/ready"]  # the latter for names that are not known
    has_engine = settings.model is not None and settings.engine != NO_ENGINE
    if not has_engine:  # else these are OpenAI's routes
        probes |= {f"/v1/models/{name}": READY for name in names}
        described.append("/v1/models/<path:name>")
        routes.append(Route("GET", "/v1/models", lambda _: {"models": [names[0]]}))
    routes += [Route("GET", path, lambda _, name: protocols.model(name)) for path in described]
    found = replace(
        knative.platform(settings, environ),
        name="kserve",
        probes=probes,
        probe_fields=_probe_fields,
        routes=routes,
        prefix=_PREFIX if has_engine else "",
        openapi_paths=_openapi_paths(routes),
    )
    return found if settings.handler is None else _with_function(found, protocols, names)


def _with_function(platform: Platform, protocols: InferenceProtocols, names: Sequence[str]) -> Platform:
    """Return the platform with the function's calls by both protocols. Each may come as an event."""
    receive, send = platform.translate_request, platform.translate_result
    assert receive is not None
    assert send is not None
    return replace(
        platform,
        aliases=[path for name in names for path in (f"/v1/models/{name}:predict", f"/v2/models/{name}/infer")],
        translate_request=lambda request: protocols.receive(receive(request)),
        translate_result=lambda request, result: send(request, protocols.send(request, result)),
    )


def _probe_fields(path: str, good: bool) -> Mapping[str, Any]:
    """Return what KServe's clients read in the body of a probe of theirs."""
    if not path.startswith(("/v1/", "/v2/")):
        return {}
    if path.endswith("/live"):
        return {"live": good}
    name = path.partition("/models/")[2].removesuffix("/ready")
    return {"name": name, "ready": good} if name else {"ready": good}


def _openapi_paths(routes: Sequence[Route]) -> dict[str, Any]:
    """Describe the routes for /openapi.json."""
    found = {}
    for route in routes:
        path = route.path.replace("<path:name>", "{name}")
        answers = {status: {"description": "As in KServe's protocols"} for status in ("200", "404")}
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        found[path] = {"get": {"responses": answers}} | ({"parameters": [name]} if "{" in path else {})
    return found
