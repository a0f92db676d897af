"""The other systems that Cicada compares itself with (§4.1): Tetris and Optimus.

Both trade memory for time. What they keep of earlier requests is there before the clock starts (``BEFORE``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from medusa_runtime.load.skeleton import skeleton
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.cicada.strategies import Job, Names, check_names, execute, sequential
from benchmarks.cicada.tracing import trace_layers
from benchmarks.cicada.workloads.workload import Workload, workload

_ALIGNED_BYTES = 64
Structure = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]
_SOURCES = {"resnet": "resnet50", "vgg": "vgg11", "tiny-resnet": "tiny-resnet", "tiny-vgg": "tiny-vgg"}


def pool(chosen: Workload, path: Path) -> dict[str, Tensor]:
    """Fill Tetris's pool: the model's tensors in shared memory, where instances of it before this one left them."""
    found = {name: tensor for key, tensor in load_file(path).items() if (name := chosen.rename(key))}
    places, size = {}, 0
    for name, tensor in found.items():
        places[name], size = size, size + -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    descriptor = os.memfd_create("tetris")
    os.truncate(descriptor, size)
    memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    os.close(descriptor)  # the mapping holds it
    shared = {}
    for name, tensor in found.items():
        place = memory[places[name] : places[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        shared[name] = place.copy_(tensor)
    return shared


def tetris(job: Job) -> Tensor:
    """A module constructed as ever, initial values included. Its tensors then become those of the pool, uncopied."""
    state = job.kept if job.kept is not None else pool(job.workload, job.path)
    with job.timeline.stage("construct"):
        model = job.workload.factory().eval()
    with job.timeline.stage("apply"):
        named = list(model.named_parameters(remove_duplicate=False))
        tensors = {id(parameter): state[name] for name, parameter in named if name in state}
        tied = {name: tensors[id(parameter)] for name, parameter in named if id(parameter) in tensors}
        check_names(model, *model.load_state_dict({**state, **tied}, strict=False, assign=True))
    trace_layers(model, job.workload, job.timeline)
    with job.timeline.stage("forward"):
        return job.workload.forward(model, job.workload.inputs())


class Idle(NamedTuple):
    """An idle container of Optimus: layers of another model, and the structures of those that are wanted."""

    layers: list[nn.Module]
    wanted: list[Structure]


def idle(chosen: Workload, path: Path) -> Idle:
    """Fill an idle container with another model of the family; with none, where there is none."""
    del path
    family = next((name for name in _SOURCES if chosen.name.startswith(name)), None)
    if family is None:
        return Idle([], [])
    with skeleton():
        wanted = [_structure(step.make()) for step in chosen.steps]
    return Idle([step.make().eval() for step in workload(_SOURCES[family]).steps], wanted)


def optimus(job: Job) -> Tensor:
    """Transform the model in memory: keep layers of the same structure, make the others, replace the weights.

    Where there is no model to transform, it starts cold. The paper finds so for all LLMs: transforming costs more.
    """
    layers, wanted = job.kept if job.kept is not None else idle(job.workload, job.path)
    if not layers:
        return sequential(job)
    left: dict[Structure, list[nn.Module]] = {}
    for layer in layers:
        left.setdefault(_structure(layer), []).append(layer)
    layers.clear()
    names, modules = Names(job), list[nn.Module]()
    with names.opened() as get:
        for step, structure in zip(job.workload.steps, wanted, strict=True):
            same = left.get(structure)
            with job.timeline.stage("construct", unit=step.name):
                module = same.pop() if same else step.make().eval()
            with job.timeline.stage("apply", unit=step.name):
                module.load_state_dict(names.tensors(step, get))
            modules.append(module)
    return execute(job, modules)


def _structure(module: nn.Module) -> Structure:
    return str(module), tuple((name, tuple(tensor.shape)) for name, tensor in module.state_dict().items())


BEFORE: dict[str, Callable[[Workload, Path], Any]] = {"tetris": pool, "optimus": idle}
BASELINES: dict[str, Callable[[Job], Tensor]] = {"tetris": tetris, "optimus": optimus}
