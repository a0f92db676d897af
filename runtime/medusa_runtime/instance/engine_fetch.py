"""The fetch of a checkpoint whose weights an engine takes from the region meanwhile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from ..config import Settings
from ..device.choice import choose
from ..errors import MedusaError
from ..fetch.prefetcher import BESIDE_IMPORTS, prefetch
from ..region.reader import Region
from ..state.restore import BundleRestorer
from ..timeline import Timeline


def prefetch_for_engine(region: Region, settings: Settings, timeline: Timeline) -> None:
    """Fill the region with the settings' model and its state bundle, beside the engine's imports.

    Raises what ``prefetch`` raises.
    """
    assert settings.model is not None
    prefetch(
        region,
        settings.model,
        settings=settings,
        timeline=timeline,
        nice=BESIDE_IMPORTS,
        bundle=BundleRestorer(settings, timeline),
        uploads=partial(uploads, settings),
        text_only=settings.engine == "torch",
    )


def uploads(settings: Settings, files: Mapping[str, bytes]) -> bool:
    """Return whether the engine copies the weights of a checkpoint with these small files to a GPU.

    An encoder is computed on the CPU.
    """
    if settings.engine not in ("torch", "vllm") or choose(settings.device, os.environ) != "cuda":
        return False
    from ..models.backend import backend  # 3 ms, which few starts need

    try:
        return backend(files.get, settings).kind in ("decoder", "vllm")
    except MedusaError:  # the engine raises it, too
        return False


__all__ = ["prefetch_for_engine", "uploads"]
