"""The strategies of Cicada's evaluation (§4.1), each a whole cold inference: from nothing to the model's output.

``sequential`` loads, then runs. ``pisel`` is the pipeline of PISeL (Fig. 7a): construction, loading and execution
follow each other layer by layer. ``mini`` is that with MiniLoader (§3.2), ``preload`` that with the Weight
Decoupler (§3.3, §3.4). ``full`` is this project's: region, prefetcher, skeleton, loader and gates.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from medusa_runtime.load.factory.build import build
from medusa_runtime.load.factory.options import BuildOptions
from medusa_runtime.load.skeleton import skeleton
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.cicada.tracing import trace_layers
from benchmarks.cicada.workloads.workload import Step, Workload

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Job:
    """One inference: of ``workload``, whose file is ``path`` (``full`` reads what comes into ``region``).

    ``kept``: what a system that keeps models has in memory before the request (``baselines.BEFORE``).
    """

    workload: Workload
    path: Path
    timeline: Timeline
    region: Region | None = None
    kept: Any = None


def sequential(job: Job) -> Tensor:
    """A module constructed as ever, initial values included; load_file; load_state_dict; forward."""
    with job.timeline.stage("construct"):
        model = job.workload.factory().eval()
    with job.timeline.stage("retrieve"):
        state = {job.workload.rename(name): tensor for name, tensor in load_file(job.path).items()}
    with job.timeline.stage("apply"):
        missing, unexpected = model.load_state_dict(state, strict=False)  # type: ignore[arg-type]
        check_names(model, missing, unexpected)
        del state
    trace_layers(model, job.workload, job.timeline)
    with job.timeline.stage("forward"):
        return job.workload.forward(model, job.workload.inputs())


def pisel(job: Job) -> Tensor:
    return _pipeline(job, mini=False)


def mini(job: Job) -> Tensor:
    return _pipeline(job, mini=True)


def preload(job: Job) -> Tensor:
    """Retrieval runs ahead on its own; a layer is applied once it is both constructed and retrieved."""
    steps, names = job.workload.steps, Names(job)
    constructed: dict[str, nn.Module] = {}
    retrieved: dict[str, dict[str, Tensor]] = {}
    ready = threading.Condition()

    def note(where: dict[str, Any], step: Step, value: Any) -> None:
        with ready:
            where[step.name] = value
            ready.notify_all()

    def construct() -> None:
        for step in steps:
            with job.timeline.stage("construct", unit=step.name):
                module = step.make().eval()
            note(constructed, step, module)

    def retrieve() -> None:
        with names.opened() as get:
            for step in steps:
                with job.timeline.stage("retrieve", unit=step.name):
                    tensors = names.tensors(step, get)
                    for tensor in tensors.values():  # a view of the mapped file until it is read
                        tensor.view(-1).view(torch.uint8)[::_PAGE_BYTES].sum()
                note(retrieved, step, tensors)

    def applied() -> Iterator[nn.Module]:
        waiting = {step.name: step for step in steps}
        done: dict[str, nn.Module] = {}
        for wanted in steps:
            while wanted.name not in done:
                with ready:
                    both = [name for name in waiting if name in constructed and name in retrieved]
                    if not both:
                        failures.check()
                        ready.wait(0.05)
                        continue
                name = both[0]
                _apply(job, waiting.pop(name), module := constructed[name], retrieved.pop(name))
                done[name] = module
            yield done[wanted.name]

    with _Failures() as failures:
        failures.thread(construct)
        failures.thread(retrieve)
        return execute(job, failures.ahead(applied()))


def full(job: Job, *, loaded: bool = False) -> Tensor:
    """The loader applies views of the region while the forward runs; gates hold it up where it is too early."""
    assert job.region is not None

    def make() -> nn.Module:
        model = job.workload.factory().eval()
        trace_layers(model, job.workload, job.timeline)
        return model

    model, loader = build(job.region, make, BuildOptions(rename=job.workload.rename), timeline=job.timeline)
    with loader:
        if loaded:
            loader.wait()
        with job.timeline.stage("forward"):
            output = job.workload.forward(model, job.workload.inputs())
        loader.wait()
    return output


def floor(job: Job) -> Tensor:
    """The first forward of a model that is already in memory: the least time and memory that a loader could need."""
    return full(job, loaded=True)


STRATEGIES: dict[str, Callable[[Job], Tensor]] = {
    "sequential": sequential,
    "pisel": pisel,
    "mini": mini,
    "preload": preload,
    "full": full,
    "converted": full,  # of a file that was converted before
    "floor": floor,
}
OURS = ("full", "converted", "floor")  # which fetch into a region


def _pipeline(job: Job, *, mini: bool) -> Tensor:
    """Three units, a thread each: construction, loading (retrieval and application), execution."""
    steps, names = job.workload.steps, Names(job)

    def construct() -> Iterator[nn.Module]:
        for step in steps:
            with job.timeline.stage("construct", unit=step.name):
                module = _made(step, mini)
            yield module

    def load(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
        with names.opened() as get:
            for step, module in zip(steps, modules, strict=True):
                _apply(job, step, module, names.tensors(step, get))
                yield module

    with _Failures() as failures:
        return execute(job, failures.ahead(load(failures.ahead(construct()))))


def _made(step: Step, mini: bool) -> nn.Module:
    if not mini:
        return step.make().eval()
    with skeleton():
        return step.make().eval()


def _apply(job: Job, step: Step, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy into the parameters; placeholders get their full precision back first (§3.2.1)."""
    with job.timeline.stage("apply", unit=step.name):
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_meta:
                    real = torch.empty(parameter.shape, dtype=parameter.dtype)
                    owner._parameters[name] = nn.Parameter(real, requires_grad=False)
        module.load_state_dict(tensors)


def execute(job: Job, modules: Iterable[nn.Module]) -> Tensor:
    state = job.workload.inputs()
    kept: list[nn.Module] = []  # for the next request, as every strategy keeps its model
    for step, module in zip(job.workload.steps, modules, strict=True):
        kept.append(module)
        with job.timeline.stage("execute", unit=step.name):
            state = step.run(module, state)
    return torch.as_tensor(state)


class Names:
    """Which of the file's tensors belong to which layer."""

    def __init__(self, job: Job) -> None:
        self._path = job.path
        self._rename = job.workload.rename

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        with safe_open(self._path, "pt") as file:
            self._names = {self._rename(name): name for name in file.keys()}  # noqa: SIM118  not a dict
            yield file.get_tensor

    def tensors(self, step: Step, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """A layer's tensors, by their names inside it."""
        prefix = f"{step.name}."
        found = [(name, source) for name, source in self._names.items() if name and name.startswith(prefix)]
        return {name.removeprefix(prefix): get(source) for name, source in found}


class _Failures:
    """Threads that end with the block, and whose errors are raised in it."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []
        self._stack = ExitStack()

    def __enter__(self) -> _Failures:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self) -> None:
        if self._errors:
            raise self._errors[0]

    def thread(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                with torch.inference_mode():
                    work()
            except BaseException as error:  # noqa: BLE001  it is raised in the thread that waits
                self._errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self._stack.callback(thread.join)

    def ahead(self, items: Iterator[nn.Module]) -> Iterator[nn.Module]:
        """The same items, made in a thread of their own as fast as they can be."""
        made: queue.SimpleQueue[nn.Module | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                for item in items:
                    made.put(item)
            finally:
                made.put(None)

        self.thread(work)
        while (item := made.get()) is not None:
            yield item
        self.check()


def check_names(model: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    """Only a tied parameter's other name may be missing."""
    named = {name for name, _ in model.named_parameters()}  # each tensor once
    if unexpected or any(name in named for name in missing):
        raise RuntimeError(f"the file does not fit the model: missing {missing}, unexpected {unexpected}")
