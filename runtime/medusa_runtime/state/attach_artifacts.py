"""Attach a bundle's artifacts to a region that the node agent has filled for all functions.

The agent's prefetcher does not know which settings a function will have, and puts no code into a region that functions
share. So an engine process that a function takes from the agent reads the bundle beside the weights itself, and never
one that the function names. A function's own engine does the same if it reads the agent's region.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

from ..checkpoint.reader import SMALL_FILES, split_url
from ..config import Settings
from ..region.reader import Region
from ..storage.base import open_store
from ..timeline import Timeline
from .bundle.locate import FOLDER
from .bundle.manifest import Manifest
from .bundle.reader import Bundle
from .key import Facts, Subject, choose_artifact
from .kinds import KINDS, PROMPT_KV, PROMPTS, WEIGHT_INDEX, Kind, file_name
from .trust import Trust
from .unused import report_unused

# What an agent's region has itself. Prompts' keys and values may be large, and the engine checks that they are for it.
_IN_REGION = (WEIGHT_INDEX, PROMPTS, PROMPT_KV)


def attach_artifacts(
    region: Region, model: str, settings: Settings, timeline: Timeline, trust: Trust | None = None
) -> None:
    """Attach to the region the artifacts beside ``model`` that are valid for these settings.

    A bad bundle never raises an error: what cannot be used is left out, and logged once. ``trust`` says whose code may
    be used; by default, the settings do.
    """
    index = region.wait_index()
    files = {name: data for name in SMALL_FILES if (data := region.file(name)) is not None}
    facts = Facts(Subject(index, files, settings))
    began_ns = time.monotonic_ns()
    try:
        store = open_store(split_url(model)[0])
        try:
            with closing(Bundle(store, f"{FOLDER}/")) as bundle:
                text = bundle.manifest_text()
                if text is None:
                    return
                manifest = Manifest.parse(text)
                for kind in KINDS.values():
                    if kind not in _IN_REGION:
                        check = partial(bundle.check_trusted, trust or Trust.of(settings), manifest)
                        _attach_one(region, bundle, manifest, kind, facts, timeline, check)
        finally:
            store.close()
    except Exception as error:  # noqa: BLE001  a start goes on without the bundle, whatever the error is
        report_unused("the state bundle", error, timeline, began_ns)


def _attach_one(
    region: Region,
    bundle: Bundle,
    manifest: Manifest,
    kind: Kind,
    facts: Facts,
    timeline: Timeline,
    check_trusted: Callable[[], None],
) -> None:
    began_ns = time.monotonic_ns()
    try:
        artifact = choose_artifact(manifest, kind, [facts])
        if artifact is not None:
            if kind.code:
                check_trusted()
            region.attach_file(file_name(kind.name), bundle.read(artifact))
            timeline.record("restore", began_ns, time.monotonic_ns(), artifact=kind.name, bytes=artifact.size)
    except Exception as error:  # noqa: BLE001
        report_unused(kind.name, error, timeline, began_ns)


__all__ = ["attach_artifacts"]
