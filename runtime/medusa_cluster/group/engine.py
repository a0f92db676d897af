"""The engine of ``--engine group``: the torch engine of a worker that shares its model with others."""

from __future__ import annotations

from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Engine
from medusa_runtime.engine.factory import open_engine as open_torch_engine
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.errors import ConfigError, ModelError
from medusa_runtime.models.backend import backend
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .follower import Follower
from .leader import Leader
from .live.source import SourceEngine
from .live.target import TargetEngine
from .plan import GroupPlan


def open_engine(region: Region, settings: Settings, timeline: Timeline, gpu: Gpu | None = None) -> Engine:
    """Return the engine for this worker's rank in ``--group``. Without ``--group``, return a whole instance's engine.

    ``gpu`` is the GPU that a worker computes on; by default the settings' device decides, as for a torch engine.
    Waits for the checkpoint's index. Raises ConfigError for an impossible group, and ModelError for a model that cannot
    be split.
    """
    if settings.group is None:  # for example when an idle process is warmed up
        return open_torch_engine(region, settings, timeline)
    plan = GroupPlan.read(settings.group)
    region.wait_index()
    if backend(region.file, settings).kind in ("encoder", "classifier"):
        if plan.mode == "disaggregated" and not plan.rank:
            return open_torch_engine(region, settings, timeline)  # there is no decode: it does all by itself
        raise ModelError("an encoder cannot be split over several workers; expected one worker for it")
    if plan.mode != "pipeline":
        if settings.layers is not None:
            raise ConfigError(f"the instances of a {plan.mode} group come to hold all layers; expected no --layers")
        return (TargetEngine if plan.rank else SourceEngine)(region, settings, timeline, plan, gpu)
    return (Follower if plan.rank else Leader)(region, settings, timeline, plan, gpu)


__all__ = ["open_engine"]
