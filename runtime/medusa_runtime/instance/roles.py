"""What the forked processes do: the prefetcher fills the region, the zygote imports an engine and forks it."""

from __future__ import annotations

import os

from ..registry import engine_kind, imported, is_remote
from ..timeline import Timeline
from .resources import InstanceResources


def preimport() -> None:
    """Import what the prefetcher and the zygote import, whatever the engine, for a process that will be continued."""
    from .. import zygote  # noqa: F401
    from . import engine_fetch  # noqa: F401


def run_prefetcher(resources: InstanceResources, timeline: Timeline) -> int:
    """Fetch the model into the region, with the help of its state bundle. Returns the exit status."""
    resources.listener.close()
    resources.heartbeats.keep("prefetcher")
    if is_remote(resources.settings.engine):
        assert resources.region is not None
        imported(engine_kind(resources.settings.engine).fetch)(resources.region, resources.settings, timeline)
        return 0
    with timeline.stage("import"):
        from .engine_fetch import prefetch_for_engine

    assert resources.region is not None
    prefetch_for_engine(resources.region, resources.settings, timeline)
    return 0


def run_zygote(resources: InstanceResources, timeline: Timeline, *, region_of_node: bool) -> int:
    """Import what the engine needs, and keep one engine running. Returns the exit status.

    ``region_of_node`` says that the region is the node agent's.
    """
    resources.listener.close()
    with timeline.stage("import"):
        from ..zygote import Zygote

    assert resources.region is not None
    assert resources.engine_listener is not None
    if region_of_node:
        _attach_code(resources, timeline)
    return Zygote(
        resources.engine_listener,
        resources.region,
        resources.settings,
        timeline=timeline,
        reports=resources.reports,
        heartbeats=resources.heartbeats,
    ).run()


def _attach_code(resources: InstanceResources, timeline: Timeline) -> None:
    """Attach compiled code and graphs to an agent's region, which has none, if the engine uses them."""
    from ..device.choice import choose

    settings = resources.settings
    if settings.state is None and (
        engine_kind(settings.engine).compiles_on_cpu or choose(settings.device, os.environ) == "cuda"
    ):
        from ..state.attach_artifacts import attach_artifacts

        assert resources.region is not None
        assert settings.model is not None
        attach_artifacts(resources.region, settings.model, settings, timeline)
