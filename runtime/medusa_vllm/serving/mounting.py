"""Mounts vLLM's server over a core that already runs, without reading or making again what the core has."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .replacement import patch_function

_PROBE = "_detect_merge_inline_system"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def front_configuration(
    core: Any, folder: str, *, name: str | list[str], generation_config: str, max_model_len: int
) -> Any:
    """Return the front end's VllmConfig: the core's, but with a tokenizer, and the small files in ``folder``."""
    from vllm.config.model import get_served_model_name

    config = copy.copy(core)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(part := getattr(config, field.name)):
            setattr(config, field.name, copy.copy(part))
    config.cache_config.num_gpu_blocks = None  # the front end adds the number that the core reports
    model = config.model_config
    model.model = model.tokenizer = folder
    model.served_model_name = get_served_model_name(folder, name)
    model.skip_tokenizer_init = False
    model.generation_config = generation_config
    model.max_model_len = max_model_len
    if config.structured_outputs_config.backend == "auto":
        config.structured_outputs_config.backend = "guidance"  # nothing to compile before the first token
    return config


@contextmanager
def reuse_configuration(config: Any) -> Iterator[None]:
    """A context in which vLLM takes the model's configuration from the core's, instead of reading config.json again.

    vLLM's tokenizers ask for it, and so do the sampling defaults of a checkpoint without generation_config.json.
    """
    model = config.model_config
    formats = ("hf", model.config_format)

    def known(before: Any, asked: Any, *arguments: Any, **options: Any) -> Any:
        if str(asked) == model.model and options.get("config_format") in formats and not model.hf_overrides:
            return model.hf_config
        return before(asked, *arguments, **options)

    with (
        patch_function("vllm.tokenizers.registry", "get_config", known),
        patch_function("vllm.transformers_utils.config", "get_config", known),
    ):
        yield


def single_tokenizer_copy() -> AbstractContextManager[None]:
    """A context in which vLLM's renderer begins with one copy of its tokenizer, and makes others when it needs them.

    It would begin with two. Copying a tokenizer means reading it again: a fifth of a second for 128k tokens.
    """
    return patch_function(
        "vllm.renderers.hf", "maybe_make_thread_pool", lambda before, tokenizer, *_: before(tokenizer, 1)
    )


def notify_on_socket(listens: Callable[[], None]) -> AbstractContextManager[None]:
    """A context in which ``listens`` is called after each ZMQ socket that a client of vLLM's core makes."""

    def make(before: Any, *arguments: Any, **options: Any) -> Any:
        made = before(*arguments, **options)
        listens()
        return made

    return patch_function("vllm.v1.engine.core_client", "make_zmq_socket", make)


@contextmanager
def share_read_tokenizer() -> Iterator[None]:
    """A context in which transformers keeps the tokenizer that it has read from its file, instead of a copy.

    Nothing else uses that one, and copying it means reading it again.
    """
    try:
        from tokenizers import Tokenizer
        from transformers import tokenization_utils_tokenizers as place
    except ImportError:
        yield
        return
    if getattr(place, "copy", None) is not copy:
        yield
        return

    def deepcopy(value: Any, *arguments: Any) -> Any:
        return value if type(value) is Tokenizer else copy.deepcopy(value, *arguments)

    vars(place)["copy"] = SimpleNamespace(**vars(copy) | {"deepcopy": deepcopy})
    try:
        yield
    finally:
        vars(place)["copy"] = copy


@contextmanager
def cache_method(target: Any, method: str) -> Iterator[None]:
    """A context in which a method of ``target`` without arguments runs once, and each caller gets a copy of its result.

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
def cache_template_probe() -> Iterator[None]:
    """A context in which vLLM's Anthropic routes try a chat template once. They would compile it four times."""
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


def cache_config_description() -> AbstractContextManager[None]:
    """A context in which vLLM's hash of a configuration describes a model's own one once, though it has two names."""
    found: dict[int, tuple[Any, Any]] = {}  # each with the object, so that no other one gets its id

    def once(before: Any, value: Any) -> Any:
        if not hasattr(value, "to_json_string"):
            return before(value)
        if id(value) not in found:
            found[id(value)] = value, before(value)
        return found[id(value)][1]

    return patch_function("vllm.config.utils", "normalize_value", once)


def freeze_without_collection() -> AbstractContextManager[None]:
    """A context in which vLLM's server freezes the heap without three collections before it.

    They take 0.15 s in a cold process and free 8 KB, because the heap was imported and stays.
    """
    return patch_function("vllm.entrypoints.launchers.utils.server_utils", "freeze_gc_heap", lambda before: gc.freeze())


def load_processors(model_config: Any) -> None:
    """Load the logits processors that are installed, which vLLM looks for at the first request."""
    from vllm.v1.sample import logits_processor

    named = model_config.logits_processors
    if load := getattr(logits_processor, "cached_load_custom_logitsprocs", None):
        load(None if named is None else tuple(named))


def declare_no_processor(config: Any, folder: Path) -> None:
    """Tell vLLM that a model without a processor's files has no processor.

    Otherwise it would look for a processor's chat template, and load the configuration and the tokenizer once more.
    """
    from vllm.renderers import hf

    model = config.model_config
    known = getattr(hf, "_PROCESSOR_CHAT_TEMPLATES", None)
    if known is None or model.is_multimodal_model or any((folder / name).exists() for name in _PROCESSOR_FILES):
        return
    code = model.code_revision if model.tokenizer == model.model else None
    known[(model.tokenizer, model.tokenizer_revision, code, model.trust_remote_code)] = None


__all__ = [
    "cache_config_description",
    "cache_method",
    "cache_template_probe",
    "declare_no_processor",
    "freeze_without_collection",
    "front_configuration",
    "load_processors",
    "notify_on_socket",
    "reuse_configuration",
    "share_read_tokenizer",
    "single_tokenizer_copy",
]  # fmt: skip
