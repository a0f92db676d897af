"""Groups whose workers are threads of the test, with real regions, engines and sockets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import SETTINGS, Served, fill_region
from host_gpu import HostGpu, Recorder
from medusa_cluster.group.engine import open_engine
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.timeline import Timeline
from waiting import until

from benchmarks.ports import free_port

FILES = ("ca_file", "cert_file", "key_file")  # of a plan with certificates
_PLAN = ("leader", "then", "form_s", "silent_s", "full", "token", "link_bytes_per_s", "mode", "schedule")
_numbers = itertools.count()


def host_gpu() -> HostGpu:
    """A GPU of host memory, for one worker."""
    return HostGpu(Recorder(), strict=True)


class Group:
    """A running group. ``workers[0]`` is the leader's; they are closed with the stack."""

    def __init__(self, stack: ExitStack, folder: Path, checkpoint: Path, layers: list[str], **settings: Any) -> None:
        plan = {
            key: settings.pop(key)
            for key in (
                "leader",
                "then",
                "form_s",
                "silent_s",
                "full",
                "token",
                "link_bytes_per_s",
                "mode",
                "schedule",
                *FILES,
            )
            if key in settings
        }
        self.gpu: Callable[[], Gpu] | None = settings.pop("gpu", None)  # makes each worker's device
        self.stack = stack
        self.folder = folder
        self.checkpoint = checkpoint
        self.layers = layers
        self.settings = settings
        self.plan = {
            "group": f"g{next(_numbers)}", "token": "secret", "size": len(layers), "then": "stay", "silent_s": 20.0,
            "leader": f"127.0.0.1:{free_port()}", "form_s": 60.0, **plan,
        }  # fmt: skip
        self.workers: list[Served] = []

    def start(self) -> Group:
        for rank in range(len(self.layers)):
            self.add(rank)
        return self

    def add(self, rank: int, **changes: Any) -> Served:
        """Start one worker, with changes to its settings or its plan."""
        plan = {**self.plan, "rank": rank}
        if rank == 0:
            plan["full"] = True
        others = ("full", "mode", "listen", "relieves", *FILES)
        plan |= {key: changes.pop(key) for key in tuple(changes) if key in plan or key in others}
        path = self.folder / f"{self.plan['group']}-{rank}.json"
        path.write_text(json.dumps(plan))
        region, gpu = changes.pop("region", None), changes.pop("gpu", self.gpu)
        if region is None:
            region = fill_region(self.checkpoint)
            self.stack.callback(region.close)
        chosen: dict[str, Any] = {"layers": self.layers[rank], "group": str(path), **self.settings, **changes}
        timeline = Timeline.create("engine")
        self.stack.callback(timeline.close)
        gpu = gpu() if gpu is not None else None
        engine = open_engine(region, replace(SETTINGS, device="cpu", **chosen), timeline, gpu)
        served = Served(engine, timeline)  # type: ignore[arg-type]
        self.stack.callback(served.close)
        self.workers.append(served)
        return served

    @property
    def leader(self) -> Served:
        return self.workers[0]

    @property
    def formed(self) -> bool:
        return self.leader.engine.stats()["workers"] == len(self.layers)

    def wait_full(self) -> None:
        """Wait until the group is formed, and each worker has all layers."""
        until(lambda: self.formed and all(worker.engine.full.is_set() for worker in self.workers))


@pytest.fixture
def group(tmp_path: Path, checkpoint: Path) -> Iterator[Callable[..., Group]]:
    """Make groups over these ranges of layers, of the tiny checkpoint; call ``start``, or ``add`` worker by worker."""
    with ExitStack() as stack:

        def make(*layers: str, folder: Path = checkpoint, **settings: Any) -> Group:
            return Group(stack, tmp_path, folder, list(layers), **settings)

        yield make
