"""Starts vLLM once on a model so that it compiles, and keeps the result.

It runs offline, in a new process. Arguments: model, folder. Standard input: the settings as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from medusa_runtime.config import Settings

from ..offline import fetch_and_import, load


def main() -> int:
    model, folder = sys.argv[1], Path(sys.argv[2])
    settings = replace(Settings(**json.load(sys.stdin)), model=model, compile="always", state="none")
    region, timeline = fetch_and_import(settings)
    from ..engine import VllmEngine

    engine = VllmEngine(region, settings, timeline, capture=folder)
    try:
        load(engine)
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
