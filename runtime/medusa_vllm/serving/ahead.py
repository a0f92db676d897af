"""What mounting vLLM's server needs and does not depend on the model: made by processes that wait, used once."""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .arguments import server_arguments

_OF_THE_MODEL = {"model", "model_tag", "served_model_name"}
# Variables that a start of the engine sets itself. Any other that differs may be one of the server's, such as its key.
_SET_BY_A_START = (
    "VLLM_CPU_", "VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_WORKER_MULTIPROC_METHOD",
)  # fmt: skip
_PROBE = "_detect_merge_inline_system"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


class _Made(NamedTuple):
    arguments: argparse.Namespace
    key: Any
    app: Any


_made: _Made | None = None
_entry_points: Any = None


def make_ahead(tasks: tuple[str, ...]) -> Any:
    """Make an app for the front end of any model that is served without flags and has these tasks, and return it."""
    global _made, _entry_points
    from vllm.entrypoints.launchers.app import build_app

    arguments = server_arguments([], "model")
    _entry_points = importlib.metadata.entry_points()
    app = build_app(arguments, tasks)
    _made = _Made(copy.deepcopy(arguments), _key(arguments, tasks), app)
    return app


def arguments_for(words: list[str], model: str) -> argparse.Namespace:
    """Like ``server_arguments``; where there are no flags, without making vLLM's parser again."""
    if words or _made is None:
        return server_arguments(words, model)
    arguments = copy.deepcopy(_made.arguments)
    arguments.model = arguments.model_tag = model
    return arguments


def app_for(arguments: argparse.Namespace, tasks: tuple[str, ...], model_config: Any) -> Any:
    """The app that was made ahead, where it is for these flags, tasks and environment; else a new one."""
    global _made
    from vllm.entrypoints.launchers.app import build_app

    made, _made = _made, None  # it is one model's from now on
    if made is None or made.key != _key(arguments, tasks):
        return build_app(arguments, tasks, model_config)
    made.app.state.args = arguments
    return made.app


def _key(arguments: argparse.Namespace, tasks: tuple[str, ...]) -> Any:
    """What routes and middleware depend on. Those of pooling models look at the model, too, but have other tasks."""
    values = {name: value for name, value in vars(arguments).items() if name not in _OF_THE_MODEL}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("VLLM_") and not name.startswith(_SET_BY_A_START)
    }
    return repr(sorted(values.items())), sorted(tasks), environment


@contextmanager
def known_plugins() -> Iterator[None]:
    """Let vLLM look for plugins in what this process, or the one that it was forked from, has read already.

    Each of its searches reads the metadata of every installed package.
    """
    if _entry_points is None:
        yield
        return
    before = importlib.metadata.entry_points
    importlib.metadata.entry_points = lambda **chosen: _entry_points.select(**chosen)
    try:
        yield
    finally:
        importlib.metadata.entry_points = before


@contextmanager
def computed_once(target: Any, method: str) -> Iterator[None]:
    """In this context a method of ``target`` without arguments runs once; each caller gets a copy of its result.

    vLLM's classes of routes each compute the same hash of the configuration, and read the same file, again.
    """
    found: list[Any] = []

    def once() -> Any:
        if not found:
            found.append(getattr(type(target), method)(target))
        return copy.copy(found[0])

    object.__setattr__(target, method, once)
    try:
        yield
    finally:
        object.__delattr__(target, method)


@contextmanager
def probed_once() -> Iterator[None]:
    """In this context vLLM tries a chat template once for its Anthropic routes, which compile it four times."""
    try:
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Messages
    except ImportError:
        yield
        return
    found = vars(Messages).get(_PROBE)
    if not isinstance(found, staticmethod):
        yield
        return
    setattr(Messages, _PROBE, staticmethod(functools.cache(found.__func__)))
    try:
        yield
    finally:
        setattr(Messages, _PROBE, found)


def without_processor(config: Any, folder: Path) -> None:
    """Tell vLLM that a model without a processor's files has no processor, whose chat template it would look for.

    Its search loads the configuration and the tokenizer once more.
    """
    from vllm.renderers import hf

    model = config.model_config
    known = getattr(hf, "_PROCESSOR_CHAT_TEMPLATES", None)
    if known is None or model.is_multimodal_model or any((folder / name).exists() for name in _PROCESSOR_FILES):
        return
    code = model.code_revision if model.tokenizer == model.model else None
    known[(model.tokenizer, model.tokenizer_revision, code, model.trust_remote_code)] = None


__all__ = [
    "app_for", "arguments_for", "computed_once", "known_plugins", "make_ahead", "probed_once", "without_processor",
]  # fmt: skip
