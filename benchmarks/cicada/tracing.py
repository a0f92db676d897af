"""When each layer runs, recorded by hooks that cost microseconds; all strategies bear them."""

from __future__ import annotations

import time
from typing import Any

from medusa_runtime.timeline import Timeline
from torch import nn

from benchmarks.cicada.workloads.workload import Workload


def trace_layers(model: nn.Module, workload: Workload, timeline: Timeline) -> None:
    """Record a stage ``execute`` for each layer of a forward."""
    for step in workload.steps:
        _Watch(step.name, model.get_submodule(step.name), timeline)


class _Watch:
    def __init__(self, name: str, module: nn.Module, timeline: Timeline) -> None:
        self._name = name
        self._timeline = timeline
        self._start_ns = 0
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._start_ns = time.monotonic_ns()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._timeline.record("execute", self._start_ns, time.monotonic_ns(), unit=self._name)
