"""Which engine of this repository runs a checkpoint: its config.json tells."""

from __future__ import annotations

from ..config import Settings
from ..models.registry import is_encoder
from ..region.reader import Region
from ..timeline import Timeline
from .base import Engine
from .checkpoint_files import read_json
from .torch.engine import TorchEngine


def open_engine(region: Region, settings: Settings, timeline: Timeline) -> Engine:
    """An encoder's or a decoder's; waits for the checkpoint's index. Raises what their construction raises."""
    if is_encoder(read_json(region, "config.json") or {}):
        from .encoder.engine import EncoderEngine

        return EncoderEngine(region, settings, timeline)
    return TorchEngine(region, settings, timeline)
