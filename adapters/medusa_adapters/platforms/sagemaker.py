"""SageMaker: the hosting container's contract (docs.aws.amazon.com, "Custom Inference Code with Hosting Services")."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import request_id

if TYPE_CHECKING:
    from medusa_handler.contract import Request, Response
    from medusa_handler.platform import Platform
    from medusa_runtime.config import Settings

_MODEL = "/opt/ml/model"
_DRAIN_S = 25.0  # SIGKILL follows SIGTERM after 30 s
_INVOKE = "/invocations"
_ID_HEADER = "X-Amzn-SageMaker-Inference-Id"
_TEXTUAL = ("", "application/json", "text/plain", "application/octet-stream", "application/x-www-form-urlencoded")
_JSON_LINES = ("application/jsonlines", "application/x-jsonlines", "application/jsonl")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    meant = {"MEDUSA_DRAIN": f"{_DRAIN_S:g}"}
    if environ.get("SAGEMAKER_BIND_TO_PORT"):
        meant["PORT"] = environ["SAGEMAKER_BIND_TO_PORT"]
    model = Path(environ.get("SM_MODEL_DIR") or _MODEL)
    if not is_multi_model(environ):
        if (model / "code" / "handler.py").is_file():
            meant["MEDUSA_HANDLER"] = str(model / "code" / "handler.py")
        if (model / "config.json").is_file() or next(model.glob("*.safetensors"), None):
            meant["MEDUSA_MODEL"] = str(model)
    return meant


def is_multi_model(environ: Mapping[str, str]) -> bool:
    """Return whether one container loads and unloads models by request (CreateModel's Mode=MultiModel)."""
    return environ.get("SAGEMAKER_MULTI_MODEL", "").lower() in ("true", "1")


def is_serverless(environ: Mapping[str, str]) -> bool:
    """Return whether this is serverless inference, which does not pass streams on.

    SageMaker sets no variable for it, but `medusa deploy` does; and it has no /dev/shm.
    """
    return environ.get("SAGEMAKER_SERVERLESS", "").lower() in ("true", "1") or not os.path.isdir("/dev/shm")


def platform(settings: Settings, environ: Mapping[str, str]) -> Platform:
    from medusa_handler.platform import READY, Platform

    streams = not is_serverless(environ)
    models = None
    if is_multi_model(environ):
        from .multi_model import ModelHost

        models = ModelHost(settings, environ)
    return Platform(
        name="sagemaker",
        probes={"/ping": READY},
        aliases=(_INVOKE,),
        routes=() if models is None else models.routes(),
        request_id=partial(request_id, name=_ID_HEADER),
        translate_request=_receive_prompt if settings.handler is None else _receive,
        translate_result=_send_answer if settings.handler is None else partial(_send, streams=streams),
        stop=None if models is None else models.close,
        streams=streams,
        openapi_paths={} if models is None else models.openapi_paths(),
        early_heartbeats=False,  # a client of InvokeEndpointWithResponseStream sees the status that is sent first
    )


def _receive(request: Request) -> Request:
    """Return the request with its path on other platforms. Raises HttpError 415 for a malformed content type."""
    from medusa_handler.contract import HttpError

    kind = request.headers.get("content-type", "")
    if kind and "/" not in kind:
        raise HttpError(415, f"expected a content type such as application/json, found {kind!r}")
    return replace(request, path="/") if request.path == _INVOKE else request


def _receive_prompt(request: Request) -> Request:
    """Translate a request for a model: JSON, lines of JSON with one prompt each, or the prompt itself."""
    from medusa_handler.contract import Headers, HttpError

    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _TEXTUAL:
        return _receive(request)
    if kind not in _JSON_LINES:
        accepted = ", ".join((*_TEXTUAL[1:4], _JSON_LINES[0]))
        raise HttpError(415, f"expected one of {accepted}, found {kind}")
    headers = {**request.headers, "Content-Type": "application/json"}
    return replace(_receive(request), headers=Headers(headers.items()), body=_one_body(request.body))


def _one_body(lines: bytes) -> bytes:
    """Return one body with the prompts of all lines, each {"prompt": …}, which must agree in all else."""
    from medusa_handler.contract import HttpError, load_json

    try:
        bodies = [load_json(line) for line in lines.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"expected a JSON object on each line: {error}") from None
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        raise HttpError(400, "expected a JSON object on each line")
    if len(bodies) == 1:
        return json.dumps(bodies[0]).encode()
    rest = [{name: value for name, value in body.items() if name != "prompt"} for body in bodies]
    if any(other != rest[0] for other in rest) or not all(isinstance(body.get("prompt"), str) for body in bodies):
        raise HttpError(400, 'expected lines that differ in "prompt" alone, which is text in each')
    return json.dumps({**rest[0], "prompt": [body["prompt"] for body in bodies]}).encode()


def _send(request: Request, result: Any, *, streams: bool) -> Any:
    from .negotiation import collect_stream, negotiate

    return negotiate(request.headers.get("accept", ""), result if streams else collect_stream(result))


def _send_answer(request: Request, answer: Response) -> Any:
    from .negotiation import negotiate_answer

    return negotiate_answer(request.headers.get("accept", ""), answer)
