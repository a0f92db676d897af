"""Models of transformers, of any task, that a user's own code runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.index import WeightIndex
from ...errors import MissingPackageError, ModelError
from ...imports.lean_transformers import import_from_transformers
from ...load.factory.applier import FactoryApplier
from ...load.factory.options import BuildOptions
from ..architectures import architecture_of
from ..base import DTYPES
from ..fields import Fields, ReadFile, read_object
from .applier import TransformersApplier
from .catalog import INSTALL, TransformersClass, file_of, installed
from .config import own_config
from .construct import construct


def pretrained_factory(
    raw: Mapping[str, Any], read: ReadFile, class_name: str | None, dtype: torch.dtype
) -> Callable[[], nn.Module]:
    """Return what constructs the model of a parsed config.json without initial values, in evaluation mode.

    Its class is ``class_name``, or else the one that config.json names. The defaults of its ``generate``, if it has
    one, are those of generation_config.json. Raises MissingPackageError without transformers, ModelError for a class
    that it does not have, and ConfigError for a configuration that it does not accept.
    """
    kind = _class(raw, class_name)
    found = TransformersClass(kind.__module__, kind.__name__, "pretrained")
    generation = read_object(read, "generation_config.json") if kind.can_generate() else None

    def factory() -> Any:
        module = construct(kind, own_config(found, raw), dtype)
        if generation is not None:
            module.generation_config = type(module.generation_config).from_dict(generation)
        return module

    return factory


def _class(raw: Mapping[str, Any], class_name: str | None) -> Any:
    name = class_name or architecture_of(raw)
    folder = installed()
    if folder is None:
        raise MissingPackageError(f"{name} is a class of transformers, which is not installed: {INSTALL}")
    file = file_of(name, str(raw.get("model_type", "")), folder)
    if file is None:
        own_code = "; code that a checkpoint brings is not run" if raw.get("auto_map") else ""
        raise ModelError(f"transformers has no class {name[:100]!a}; expected another class_name{own_code}")
    module = f"transformers.models.{file.parent.name}.{file.stem}"
    bases = re.search(rf"^class {name}\(([^)]*)\)", file.read_text(), re.MULTILINE)
    generates = bases is not None and "GenerationMixin" in bases[1]
    kind = getattr(import_from_transformers(module, generation=generates, whole=_has_others(file.parent)), name)
    if not hasattr(kind, "can_generate"):
        raise ModelError(f"expected class_name to be a model of transformers, found {name!a}")
    if not generates and kind.can_generate():  # by a method of its own, or by one that it inherits
        kind = getattr(import_from_transformers(module, generation=True), name)
    return kind


def _has_others(folder: Path) -> bool:
    """Return whether the models in a folder of transformers' contain other models, which their configuration names."""
    sources = (*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py"))
    return any(re.search(r"^\s*from \.\.auto", file.read_text(), re.MULTILINE) for file in sources)


def pretrained_applier(
    read: ReadFile, module: nn.Module, factory: Callable[[], nn.Module], options: BuildOptions
) -> FactoryApplier:
    """Return the applier that names the tensors of a module of transformers as ``from_pretrained`` does."""
    try:
        from transformers import conversion_mapping, core_model_loading  # noqa: F401  from transformers 5 on
    except ImportError:
        return FactoryApplier(module, factory, options)
    raw = read_object(read, "config.json") or {}
    floats = (one.dtype for one in module.parameters() if one.dtype in DTYPES.values())
    dtype = options.dtype or next(floats, torch.float32)
    return _PretrainedApplier(module, factory, dtype, Fields(raw).quantization(), options)


class _PretrainedApplier(TransformersApplier):
    """The applier for a module that a user's code made."""

    def hint(self, absent: list[str], index: WeightIndex) -> str:
        return (
            f"Is {type(self.module).__name__} the class of this checkpoint? strict=False gives initial values to others"
        )


__all__ = ["pretrained_applier", "pretrained_factory"]
