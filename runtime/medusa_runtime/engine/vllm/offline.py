"""What every process does that starts vLLM offline: all that an instance's processes have done before its engine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ...config import Settings
from ...timeline import Timeline
from ...weights.prefetcher import prefetch
from ...weights.region import Region
from .imports import preimport

if TYPE_CHECKING:
    from .engine import VllmEngine


def fetch_and_import(settings: Settings) -> tuple[Region, Timeline]:
    """A region with ``settings.model``, and vLLM imported for it."""
    assert settings.model is not None
    region, timeline = Region.create(), Timeline.create("offline")
    prefetch(region, settings.model, settings=settings, timeline=timeline)
    preimport(settings, region)
    return region, timeline


def load(engine: VllmEngine) -> None:
    """Let an engine do what it does before it serves: load, compile, capture."""
    stop = threading.Event()
    stop.set()
    engine.run(stop)


__all__ = ["fetch_and_import", "load"]
