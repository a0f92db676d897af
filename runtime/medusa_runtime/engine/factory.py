"""Opens the torch engine for a checkpoint: the encoders' or the decoders', as ``models/backend.py`` decides."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..config import Settings
from ..errors import ConfigError
from ..models.backend import backend
from ..region.reader import Region
from ..state.kinds import RECORDING_VARIABLE
from ..timeline import Timeline
from .base import Engine
from .torch.engine import TorchEngine

logger = logging.getLogger(__name__)


def open_engine(region: Region, settings: Settings, timeline: Timeline) -> Engine:
    """Open the engine for this checkpoint. Waits for its weight index.

    Raises ConfigError with ``--layers``, and what the construction of the engine raises.
    """
    if settings.layers is not None:
        raise ConfigError("--layers is for a worker that shares a model with others: expected --engine group with it")
    region.wait_index()
    found = backend(region.file, settings)
    if found.text_only:
        logger.info("%s", found)
    if found.kind in ("encoder", "classifier"):
        from .encoder.engine import EncoderEngine

        return EncoderEngine(region, settings, timeline)
    if folder := os.environ.get(RECORDING_VARIABLE):
        from .torch.recording import RecordingEngine

        return RecordingEngine(region, settings, timeline, Path(folder))
    return TorchEngine(region, settings, timeline)
