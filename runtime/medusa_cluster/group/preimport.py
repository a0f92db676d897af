"""What a process imports before it forks the engine of a group. Importing this file itself imports no torch."""

from __future__ import annotations

from medusa_runtime.config import Settings
from medusa_runtime.engine.preimport import preimport as preimport_torch
from medusa_runtime.region.reader import Region


def preimport(settings: Settings, region: Region | None = None) -> None:
    """Import what the torch engine needs, and the group's own modules; see ``registry.EngineKind``."""
    preimport_torch(settings, region)
    from . import engine  # noqa: F401


__all__ = ["preimport"]
