"""What the forked processes do: the prefetcher fills the region, the zygote imports an engine and forks it."""

from __future__ import annotations

import os

from ..registry import engine_kind, imported, is_remote
from ..timeline import Timeline
from .shared import Shared


def run_prefetcher(shared: Shared, timeline: Timeline) -> int:
    """Fetch the model into the region, with the help of its state bundle. Returns the exit status."""
    shared.listener.close()
    shared.heartbeats.keep("prefetcher")
    if is_remote(shared.settings.engine):
        assert shared.region is not None
        imported(engine_kind(shared.settings.engine).fetch)(shared.region, shared.settings, timeline)
        return 0
    with timeline.stage("import"):
        from ..fetch.prefetcher import BESIDE_IMPORTS, prefetch
        from ..state.restore import BundleRestorer

    region, settings = shared.region, shared.settings
    assert region is not None
    assert settings.model is not None
    bundle = BundleRestorer(settings, timeline)
    prefetch(region, settings.model, settings=settings, timeline=timeline, nice=BESIDE_IMPORTS, bundle=bundle)
    return 0


def run_zygote(shared: Shared, timeline: Timeline, *, region_of_node: bool) -> int:
    """Import what the engine needs, and keep one engine running. Returns the exit status.

    ``region_of_node`` says that the region is the node agent's.
    """
    shared.listener.close()
    with timeline.stage("import"):
        from ..zygote import Zygote

    assert shared.region is not None
    assert shared.engine_listener is not None
    if region_of_node:
        _attach_code(shared, timeline)
    return Zygote(
        shared.engine_listener,
        shared.region,
        shared.settings,
        timeline=timeline,
        reports=shared.reports,
        heartbeats=shared.heartbeats,
    ).run()


def _attach_code(shared: Shared, timeline: Timeline) -> None:
    """Attach compiled code and graphs to an agent's region, which has none, if the engine uses them."""
    from ..device.choice import choose

    settings = shared.settings
    if settings.state is None and (
        engine_kind(settings.engine).compiles_on_cpu or choose(settings.device, os.environ) == "cuda"
    ):
        from ..state.attach_artifacts import attach_artifacts

        assert shared.region is not None
        assert settings.model is not None
        attach_artifacts(shared.region, settings.model, settings, timeline)
