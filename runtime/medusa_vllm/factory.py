"""Opens the engine or, for a version of vLLM without the parts that the engine uses, the compatible mode."""

from __future__ import annotations

import logging
import mmap
import os
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.engine.preimport import limit_compiled_products
from medusa_runtime.errors import MedusaError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from medusa_runtime.zygote import RESTART

from .version import MISSING_PART_ERRORS, installed_version, missing_part, tested_versions

logger = logging.getLogger(__name__)

# A page that forks share. An engine that misses a part of vLLM writes the reason here for the next one.
_shared = mmap.mmap(-1, mmap.PAGESIZE)


def preimport(settings: Settings, region: Region | None = None) -> None:
    """Import what the engine needs, or find out that this version of vLLM has other parts.

    Raises MissingPackageError without vLLM, and errors that do not come from its version.
    """
    limit_compiled_products()
    if settings.vllm_mode == "compatible":
        _require_compatible("--vllm-mode compatible was given")
        return
    try:
        from .imports import preimport as import_parts

        import_parts(settings, region)
    except MISSING_PART_ERRORS as error:
        if (part := missing_part(error)) is None:
            raise
        _require_compatible(part)


def open_engine(region: Region, settings: Settings, timeline: Timeline) -> Any:
    """Return vLLM as an engine. In the compatible mode, this waits until vLLM's own server answers."""
    if not is_compatible():
        try:
            from .engine import VllmEngine

            return VllmEngine(region, settings, timeline, on_load_error=_leave_for_compatible)
        except (MedusaError, *MISSING_PART_ERRORS) as error:
            if (part := missing_part(error)) is None:
                raise
            _require_compatible(part)
    from .compatible.engine import CompatibleEngine

    logger.warning(
        "vLLM %s: %s. Its own server and processes are used, with weights from medusa's region: answers are the same, "
        "and a start takes as long as vLLM's own (fast ones were tested with %s)",
        installed_version(),
        bytes(_shared[1:]).rstrip(b"\0").decode(errors="replace"),
        tested_versions(),
    )
    timeline.mark("compatible")
    return CompatibleEngine(region, settings, timeline)


def is_compatible() -> bool:
    """Return whether vLLM's own server and processes are used in this process and in its forks."""
    return bool(_shared[0])


def _leave_for_compatible(error: MedusaError) -> None:
    """End this process if it could not load a model for want of a part of vLLM: the next one is compatible."""
    if (part := missing_part(error)) is not None:
        _require_compatible(part)
        os._exit(RESTART)


def _require_compatible(reason: str) -> None:
    data = reason.encode()[: mmap.PAGESIZE - 1]
    _shared[:] = b"\1" + data.ljust(mmap.PAGESIZE - 1, b"\0")
