"""The imports of a process that will fork a group's engine. Importing this module itself does not import torch."""

from __future__ import annotations

from medusa_runtime.config import Settings
from medusa_runtime.engine.preimport import preimport as preimport_torch
from medusa_runtime.region.reader import Region


def preimport(settings: Settings, region: Region | None = None) -> None:
    """Import the torch engine's modules and the group's own. See ``registry.EngineKind``."""
    preimport_torch(settings, region)
    from . import engine  # noqa: F401


__all__ = ["preimport"]
