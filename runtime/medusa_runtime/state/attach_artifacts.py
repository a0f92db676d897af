"""What a bundle knows of a checkpoint, for an engine whose region was filled for all functions of a node.

The agent's prefetcher does not know the settings that a function will have, nor whom it may give code. The engine
process that a function takes looks for itself, beside the weights that the agent fetched, and nowhere a function names;
so does a function's own engine that reads the agent's region.
"""

from __future__ import annotations

import logging
import time

from ..checkpoint.reader import SMALL_FILES
from ..config import Settings
from ..errors import MedusaError
from ..region.reader import Region
from ..storage.base import open_store
from ..timeline import Timeline
from .bundle import Bundle
from .key import Facts, Subject, choose
from .kinds import KINDS, WEIGHT_INDEX, Kind, file_name
from .locate import FOLDER
from .manifest import Manifest

logger = logging.getLogger(__name__)


def attach_artifacts(region: Region, model: str, settings: Settings, timeline: Timeline) -> None:
    """Lend the region the artifacts beside ``model`` that are valid for these settings. Never raises for a bundle: what
    cannot be used is left out and said once."""
    index = region.wait_index()
    files = {name: data for name in SMALL_FILES if (data := region.file(name)) is not None}
    facts = Facts(Subject(index, files, settings))
    began_ns = time.monotonic_ns()
    try:
        store = open_store(model)
        try:
            bundle = Bundle(store, f"{FOLDER}/")
            manifest = bundle.manifest()
            for kind in KINDS.values():
                if manifest is not None and kind is not WEIGHT_INDEX:
                    _attach_one(region, bundle, manifest, kind, facts, timeline)
        finally:
            store.close()
    except MedusaError as error:
        _leave_out("the state bundle", error, timeline, began_ns)


def _attach_one(
    region: Region, bundle: Bundle, manifest: Manifest, kind: Kind, facts: Facts, timeline: Timeline
) -> None:
    began_ns = time.monotonic_ns()
    try:
        artifact = choose(manifest, kind, [facts])
        if artifact is not None:
            region.attach_file(file_name(kind.name), bundle.read(artifact))
            timeline.record("restore", began_ns, time.monotonic_ns(), artifact=kind.name, bytes=artifact.size)
    except MedusaError as error:
        _leave_out(kind.name, error, timeline, began_ns)


def _leave_out(what: str, error: Exception, timeline: Timeline, began_ns: int) -> None:
    logger.warning("%s is not used: %s", what, error)
    timeline.record("restore", began_ns, time.monotonic_ns(), artifact=what, left_out=str(error)[:300])


__all__ = ["attach_artifacts"]
