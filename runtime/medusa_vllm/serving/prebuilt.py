"""The parts of vLLM's server that do not depend on the model, built in advance by idle processes, and used once."""

from __future__ import annotations

import argparse
import copy
import fnmatch
import logging
import os
from typing import Any, NamedTuple

from .arguments import server_arguments
from .replacement import read_entry_points

logger = logging.getLogger(__name__)

_MODEL_ARGUMENTS = {"model", "model_tag", "served_model_name"}
# Variables that change the server: vLLM's, and those that put the user's middleware and handlers into it.
_READ_BY_SERVER = ("VLLM_", "SAGEMAKER_", "CUSTOM_")
# Variables that an engine's start sets itself. Any other that differs may concern the server, such as its key.
_SET_BY_ENGINE = (
    "VLLM_CPU_", "VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_WORKER_MULTIPROC_METHOD",
)  # fmt: skip
_TEMPLATE = """{%- for message in messages %}{% set role = message['role'] | trim %}
{%- if loop.first and role == 'system' and tools is not none %}{{ bos_token + message.content }}{% else %}
{{- '<' ~ role ~ '>' + message['content'] }}{% endif %}{% endfor %}{# end #}
{%- if add_generation_prompt %}{{ 1 }}{% endif %}"""


class _Prebuilt(NamedTuple):
    arguments: argparse.Namespace
    key: Any
    app: Any


_prebuilt: _Prebuilt | None = None
_in_use: _Prebuilt | None = None


def prebuild_app(tasks: tuple[str, ...]) -> Any:
    """Make an app for the front end of any model that is served without flags and has these tasks, and return it."""
    global _prebuilt
    from vllm.entrypoints.launchers.app import build_app

    arguments = server_arguments([], "model")
    read_entry_points()
    app = build_app(arguments, tasks)
    _prebuilt = _Prebuilt(copy.deepcopy(arguments), _key(arguments, tasks), app)
    return app


def arguments_for(words: list[str], model: str) -> argparse.Namespace:
    """Return what ``server_arguments`` returns. Without flags, vLLM's parser is not built again."""
    if words or _prebuilt is None:
        return server_arguments(words, model)
    arguments = copy.copy(_prebuilt.arguments)
    arguments.model = arguments.model_tag = model
    return arguments


def take_app(arguments: argparse.Namespace, tasks: tuple[str, ...], model_config: Any) -> Any:
    """Return the app that was prebuilt, if it fits these flags, tasks and environment; else a new one."""
    global _prebuilt, _in_use
    from vllm.entrypoints.launchers.app import build_app

    prebuilt, _prebuilt = _prebuilt, None  # from now on it belongs to one model
    if prebuilt is None or prebuilt.key != _key(arguments, tasks):
        return build_app(arguments, tasks, model_config)
    _in_use = prebuilt
    prebuilt.app.state.args = arguments
    return prebuilt.app


def return_app(app: Any) -> None:
    """Keep for the next front end an app that was prebuilt. The front end that used it has deleted its state."""
    global _prebuilt, _in_use
    from starlette.datastructures import State

    if _in_use is not None and _in_use.app is app:
        app.state = State()
        _prebuilt, _in_use = _in_use, None


def _key(arguments: argparse.Namespace, tasks: tuple[str, ...]) -> Any:
    """Return the values on which routes and middleware depend.

    Those of pooling models also depend on the model, but such models have other tasks.
    """
    values = {name: value for name, value in vars(arguments).items() if name not in _MODEL_ARGUMENTS}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_BY_SERVER) and not name.startswith(_SET_BY_ENGINE)
    }
    return repr(sorted(values.items())), sorted(tasks), environment


def quiet_uvicorn() -> None:
    """Have uvicorn log warnings only. Setting a level goes through all loggers, so it is not set twice."""
    for name in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        named = logging.getLogger(name)
        if named.level != logging.WARNING:
            named.setLevel(logging.WARNING)


def fill_caches() -> None:
    """Fill caches of vLLM's libraries that the first model or request would fill, and that are the same for all.

    Their names differ between versions. A cache that is not found here is filled later, as usual.
    """
    for fill in (_parse_template, _compile_patterns, _build_validators):
        try:
            fill()
        except Exception as error:  # noqa: BLE001 - nothing depends on it
            logger.debug("%s of vLLM's server: %s: %s", fill.__name__, type(error).__name__, error)


def _parse_template() -> None:
    from vllm.renderers.hf import _detect_content_format

    _detect_content_format(_TEMPLATE, default="string")


def _compile_patterns() -> None:
    from transformers.models.auto.tokenization_auto import MODEL_IDS_TO_TOKENIZERS_BACKEND

    for pattern in MODEL_IDS_TO_TOKENIZERS_BACKEND:
        fnmatch.fnmatch("", pattern)


def _build_validators() -> None:
    """Build pydantic's validators for the parts of responses, which OpenAI's package leaves to their first use."""
    from pydantic import BaseModel
    from vllm.entrypoints.openai.responses import serving

    for kind in list(vars(serving).values()):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind.model_rebuild()


__all__ = [
    "arguments_for",
    "fill_caches",
    "prebuild_app",
    "quiet_uvicorn",
    "return_app",
    "take_app",
]
