"""What a process imports before it forks torch engines. Importing this file itself imports no torch."""

from __future__ import annotations

import logging

from ..config import Settings
from ..region.reader import Region

logger = logging.getLogger(__name__)


def preimport(settings: Settings, _region: Region | None = None) -> None:
    """Import torch, leanly on a CPU, and every model family; see ``registry.EngineKind``."""
    if settings.device == "cuda":
        if settings.torch_import == "lean":
            logger.warning("importing torch plainly: the engine uses a GPU, the lean import was tested without")
    elif settings.torch_import != "plain":
        from ..imports.lazy_torch import import_torch

        import_torch(numpy=False)  # nothing in the engine process uses it
    from ..models.registry import import_families

    import_families()
