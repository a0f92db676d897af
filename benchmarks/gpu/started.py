"""Starts an engine on the machine's GPU, up to where its weights are loaded, with nothing captured yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu.decode_graphs import DecodeGraphs
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.engine.gpu.runner import GpuRunner
from medusa_runtime.engine.torch.engine import TorchEngine
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from benchmarks.gpu.machine import Machine

SETTINGS = Settings(max_concurrency=256, max_waiting=512, max_model_len=2048, state="none")


def settings_for(model: str, *, dry_run: bool) -> Settings:
    """Settings with a KV cache of fixed size, so that two processes have the same addresses and offsets."""
    if dry_run:
        return replace(SETTINGS, model=model, max_concurrency=8, max_model_len=64, kv_cache_mb=4, threads=1)
    return replace(SETTINGS, model=model, kv_cache_mb=16384, device="cuda")


@dataclass
class Started:
    engine: TorchEngine
    gpu: Gpu
    region: Region
    timeline: Timeline

    @property
    def runner(self) -> GpuRunner:
        runner = self.engine.runner
        assert isinstance(runner, GpuRunner)
        return runner

    @property
    def graphs(self) -> DecodeGraphs:
        graphs = self.runner.graphs
        assert graphs is not None, "this model's decode steps cannot be captured"
        return graphs


@contextmanager
def started(machine: Machine, settings: Settings, *, wait: bool = True) -> Iterator[Started]:
    """A started engine. ``wait``: wait for the weights.

    The checkpoint is a folder on this machine, whose files are in the page cache if memory allows.
    """
    assert settings.model is not None
    timeline = Timeline.create("engine")
    region = Region.create()
    fetch = threading.Thread(
        target=prefetch,
        args=(region, settings.model),
        kwargs={"settings": settings, "timeline": timeline.named("prefetcher")},
    )
    fetch.start()
    gpu = machine.gpu()
    engine = TorchEngine(region, settings, timeline, gpu)
    try:
        if wait:
            engine.wait_ready()
        yield Started(engine, gpu, region, timeline)
    finally:
        fetch.join()
        engine.close()
        region.close()
