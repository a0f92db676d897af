"""A check of a checkpoint before any start. It reads vLLM's files, because importing vLLM takes seconds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.config import Settings
from medusa_runtime.engine.preflight import check_tokenizer
from medusa_runtime.errors import ModelError, short_repr
from medusa_runtime.models.architectures import architecture_of
from medusa_runtime.models.backend import backend
from medusa_runtime.models.fields import ReadFile, read_object
from medusa_runtime.models.transformers.catalog import file_of, installed

from .plugin import GROUP, PLUGINS
from .version import installed_version
from .weights.completeness import check_scales, method_of

_MODELS = "model_executor/models/registry.py"
_KNOWN = ("medusa_vllm.", "vllm.")  # where plugins are that bring no architectures
_METHODS = "model_executor/layers/quantization/__init__.py"


def check(read: ReadFile, index: WeightIndex, settings: Settings) -> None:
    """Check config.json, the scales of weights of 8 bits, and the tokenizer.

    The architecture and the quantization are looked up if vLLM is installed. Which tensors its model has is not known
    without building it. Raises ModelError for what vLLM does not know, MismatchError and CorruptError.
    """
    backend(read, settings)
    config = read_object(read, "config.json") or {}
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        _look_up(config, Path(spec.origin).parent)
    check_scales(config, index)
    check_tokenizer(read)


def _look_up(config: Mapping[str, Any], package: Path) -> None:
    """Raise ModelError for an architecture or a quantization that the vLLM in this folder does not name."""
    architecture, method = architecture_of(config), method_of(config)
    if not _names(package / _MODELS, architecture) and not config.get("auto_map"):
        folder = installed()  # vLLM runs some models by transformers' code
        if folder is None or file_of(architecture, str(config.get("model_type", "")), folder) is None:
            _look_at_plugins(f"vLLM {installed_version()} does not know the architecture {architecture[:100]}")
    if method is not None and not _names(package / _METHODS, method):
        _look_at_plugins(f"vLLM {installed_version()} does not know the quant_method {short_repr(method)}")


def _look_at_plugins(problem: str) -> None:
    """Raise ModelError with this problem, unless a plugin of vLLM will be called, which may know what vLLM does not."""
    named = os.environ.get(PLUGINS, "").split(",")
    others = [one for one in importlib.metadata.entry_points(group=GROUP) if not one.value.startswith(_KNOWN)]
    if any(one.name in named for one in others):
        return
    if others:
        names = ", ".join(sorted({one.name for one in others}))
        problem += f"; a plugin may, which is only called where {PLUGINS} names it (installed: {names})"
    raise ModelError(problem)


def _names(file: Path, name: object) -> bool:
    """Return whether a file of vLLM has this string. One that is not there may have another name by now."""
    return not file.is_file() or f'"{name}"' in file.read_text(errors="replace")


__all__ = ["check"]
