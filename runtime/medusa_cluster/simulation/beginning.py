"""The state in which a simulation begins: provisioned instances, the parameter pool, each model's minimum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policy.index import Index
from ..policy.pool import spread
from ..policy.state import Role, StartInstance
from .execution import SimExecution
from .node import SimCopy

if TYPE_CHECKING:
    from .simulator import Simulation


def provision(sim: Simulation, execution: SimExecution, part: float) -> None:
    """Let instances serve from the beginning, on this part (0 to 1) of the devices, divided among the models."""
    models = sim.models
    places = [node for node in sim.nodes.values() for _ in range(node.machine.devices)]
    for number, node in enumerate(places[: max(round(part * len(places)), 1)]):
        model = models[number % len(models)]
        turn = number // len(models)
        role: Role = "both" if not model.model.disaggregated else "decode" if turn % 2 else "prefill"
        execution.begin(execution.make(StartInstance(f"p{number}", model.model.name, node.name, role)))


def begin_minimum(sim: Simulation, execution: SimExecution) -> None:
    """Let each model's minimum of instances serve from the beginning, if possible where its weights are."""
    for model in sim.models:
        roles: tuple[Role, ...] = ("prefill", "decode") if model.model.disaggregated else ("both",)
        url, size = f"m://{model.model.name}", model.model.profile.size_bytes
        for number in range(model.model.min * len(roles)):
            nodes = (node for node in sim.nodes.values() if node.can_run(model.model))
            node = min(nodes, key=lambda node: url not in node.copies, default=None)
            if node is None:
                return
            node.copies.setdefault(url, SimCopy(url, size, base=size, complete=True))
            start = StartInstance(f"{url}{number}", model.model.name, node.name, roles[number % len(roles)])
            execution.begin(execution.make(start))


def fill_pool(sim: Simulation, execution: SimExecution) -> None:
    """Fill the parameter pool at the beginning, like that of a cluster which has been running for a while."""
    index, nodes = Index(), {name: node.to_policy() for name, node in sim.nodes.items()}
    index.update(nodes)
    for url, name in spread(index, nodes, sim.deployments.values()).items():
        size = sim.fleet.models[sim.numbers[url.removeprefix("m://")]].profile.size_bytes
        sim.nodes[name].copies[url] = SimCopy(url, size, pinned=True, base=size, complete=True)
        execution.touch(sim.nodes[name])
