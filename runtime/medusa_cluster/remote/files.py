"""The fetch of a deployed model's small files and its engine's description, in place of its weights."""

from __future__ import annotations

import base64
import json
import logging
import time

from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.config import Settings
from medusa_runtime.errors import EngineError, MedusaError, UnreachableError
from medusa_runtime.region.layout import State
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .gateways import Gateways

logger = logging.getLogger(__name__)

INFO = "cluster-engine.json"  # the name of the engine's description in the region
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


def fetch(region: Region, settings: Settings, timeline: Timeline) -> None:
    """Fill a region that has no weights. An unreachable gateway is tried for as long as requests are held.

    An error is left in the region for its readers, and raised.
    """
    writer = region.writer()
    try:
        if writer.state == State.DONE:
            return
        gateways = Gateways.of(settings)
        with timeline.stage("describe", model=settings.model):
            found = _describe(gateways, settings)
        try:
            files = {str(name): base64.b64decode(data) for name, data in found["files"].items()}
            files[INFO] = json.dumps(found["info"]).encode()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"expected a description of the model from the cluster, found none: {error}") from None
        writer.lay_out(WeightIndex((), {}), files)
        writer.finish()
    except MedusaError as error:
        writer.fail(error)
        raise
    finally:
        writer.close()


def _describe(gateways: Gateways, settings: Settings) -> dict[str, dict[str, str]]:
    deadline = time.monotonic() + settings.hold_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            answer = gateways.ask("/medusa/describe", {"model": settings.model})
        except (EngineError, UnreachableError) as error:
            if time.monotonic() + pause_s > deadline:
                raise
            if pause_s < _LONGEST_PAUSE_S <= 2 * pause_s:  # once, after some seconds
                logger.warning("%s; it is tried for %g s", error, settings.hold_s)
        else:
            if isinstance(answer, dict):
                return answer
            raise EngineError("expected a description of the model from the cluster, found something else")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
