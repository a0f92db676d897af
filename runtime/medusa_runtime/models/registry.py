"""The classes that run the supported architectures."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from medusa_runtime.models.architectures import ARCHITECTURES, architecture_of, has_family, unsupported
from medusa_runtime.models.fields import Fields

if TYPE_CHECKING:
    from medusa_runtime.models.base import DecoderModel, ModelConfig


def family(architecture: str) -> type[DecoderModel]:
    """Return the model class of an architecture. Raises ModelError, which lists the known ones."""
    if architecture not in ARCHITECTURES:
        raise unsupported(architecture)
    module, _, name = ARCHITECTURES[architecture].partition(":")
    found: type[DecoderModel] = getattr(import_module(f"medusa_runtime.models.{module}"), name)
    return found


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of the decoder that a parsed config.json describes. Imports torch.

    Raises ModelError for an architecture or a feature that is not supported, and ConfigError for a key that is missing
    or wrong.
    """
    architecture = architecture_of(raw)
    if not has_family(raw):
        from medusa_runtime.models.transformers.config import TransformersConfig

        return TransformersConfig.of(raw)
    return family(architecture).config_class.read(architecture, Fields(raw))


def import_families() -> None:
    """Import every family's module, for a process from which engines are forked."""
    for target in set(ARCHITECTURES.values()):
        import_module(f"medusa_runtime.models.{target.partition(':')[0]}")
