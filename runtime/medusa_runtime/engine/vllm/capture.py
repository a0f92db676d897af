"""Offline, a process of its own: start vLLM once on a model so that it compiles, and keep what it made.

Arguments: model, folder. Standard input: the settings as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

from ...config import Settings
from ...timeline import Timeline
from ...weights.prefetcher import prefetch
from ...weights.region import Region
from .imports import preimport


def main() -> int:
    model, folder = sys.argv[1], Path(sys.argv[2])
    settings = replace(Settings(**json.load(sys.stdin)), model=model, compile="always", state="none")
    region, timeline = Region.create(), Timeline.create("capture")
    prefetch(region, model, settings=settings, timeline=timeline)
    preimport(settings, region)
    from .engine import VllmEngine

    engine = VllmEngine(region, settings, timeline, capture=folder)
    stop = threading.Event()
    stop.set()
    try:
        engine.run(stop)  # loads, which compiles, and serves nobody
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
