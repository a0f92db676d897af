"""Starts vLLM offline: does what an instance's other processes have done before its engine starts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from medusa_runtime.config import Settings
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .imports import preimport

if TYPE_CHECKING:
    from .engine import VllmEngine


def fetch_and_import(settings: Settings) -> tuple[Region, Timeline]:
    """Fetch ``settings.model`` into a region, and import vLLM for it."""
    assert settings.model is not None
    region, timeline = Region.create(), Timeline.create("offline")
    prefetch(region, settings.model, settings=settings, timeline=timeline)
    preimport(settings, region)
    return region, timeline


def load(engine: VllmEngine) -> None:
    """Let an engine do what it does before it serves: load, compile and capture."""
    stop = threading.Event()
    stop.set()
    engine.run(stop)


__all__ = ["fetch_and_import", "load"]
