"""The engine of ``--engine vllm-group``: the vLLM engine of a worker that shares its model with others."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.device.choice import choose
from medusa_runtime.errors import ConfigError, EngineError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from medusa_vllm import factory
from medusa_vllm.version import MISSING_PART_ERRORS, is_tested

from ..plan import GroupPlan

logger = logging.getLogger(__name__)

_IMPORTED = "medusa_vllm.executor"  # the last import of the vLLM engine; if it is there, so are all others


def preimport(settings: Settings, region: Region | None = None) -> None:
    """Import the vLLM engine's modules and the group's own. See ``registry.EngineKind``."""
    if _IMPORTED not in sys.modules:  # else this was an idle process for a vLLM instance, with the same imports
        factory.preimport(replace(settings, engine="vllm"), region)
    if settings.group is not None and not factory.is_compatible():
        try:
            from . import rank  # noqa: F401
        except MISSING_PART_ERRORS as error:
            logger.debug("vLLM has no parts for a group: %s", error)


def open_engine(region: Region, settings: Settings, timeline: Timeline) -> Any:
    """Return the engine for this worker's rank in ``--group``. Without ``--group``, return a whole instance's engine.

    Waits for the checkpoint's index. Raises ConfigError for an impossible group, and ModelError for a model that vLLM
    does not split. If this version of vLLM lacks parts that a group needs, the leader is a whole instance.
    """
    settings = replace(settings, engine="vllm")
    if settings.group is None:
        return factory.open_engine(region, settings, timeline)
    plan = GroupPlan.read(settings.group)
    if choose(settings.device, {}) == "cuda":
        raise ConfigError("the workers of a group of vLLM compute on CPUs; expected --device cpu, or --engine torch")
    if plan.mode != "pipeline":
        raise ConfigError(f"a group of vLLM's workers is a pipeline; expected no mode {plan.mode!r}")
    missing = _missing()
    if missing is None:
        from .follower import VllmFollower
        from .leader import VllmLeader

        try:
            return (VllmFollower if plan.rank else VllmLeader)(region, settings, timeline, plan)
        except MISSING_PART_ERRORS as error:
            if is_tested():
                raise
            missing = f"{type(error).__name__}: {error}"
    if plan.rank:
        raise EngineError(f"this vLLM cannot be a worker of a group: {missing}")
    logger.warning("no group was formed: %s; going on alone with all layers", missing)
    timeline.mark("alone", reason=missing)
    region.pace(1.0, 1.0)
    return factory.open_engine(region, settings, timeline)


def _missing() -> str | None:
    """Return which of the inner parts that a group needs this version of vLLM lacks, or None if it has all."""
    if factory.is_compatible():
        return "its inner parts are not used (--vllm-mode compatible, or a version without them)"
    try:
        from . import rank  # noqa: F401 - imports all the inner parts
    except MISSING_PART_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.worker.gpu_worker import Worker

    lacking = [name for name in ("isend_tensor_dict", "irecv_tensor_dict") if not hasattr(GroupCoordinator, name)]
    lacking += [name for name in ("execute_model", "sample_tokens") if not hasattr(Worker, name)]
    return f"it has no {lacking[0]}" if lacking else None


__all__ = ["open_engine", "preimport"]
