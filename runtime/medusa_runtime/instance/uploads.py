"""Whether an instance's engine copies a checkpoint's weights to a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..config import Settings
from ..device.choice import choose
from ..errors import MedusaError


def uploads(settings: Settings, files: Mapping[str, bytes]) -> bool:
    """Return whether the engine copies the weights to a GPU. ``files`` are the checkpoint's small ones.

    An encoder is computed on the CPU.
    """
    if settings.engine not in ("torch", "vllm") or choose(settings.device, os.environ) != "cuda":
        return False
    from ..models.backend import backend  # 3 ms, which no start without a GPU needs

    try:
        return backend(files.get, settings).kind in ("decoder", "vllm")
    except MedusaError:  # the engine raises it, too
        return False


__all__ = ["uploads"]
