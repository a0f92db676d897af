"""The time that the policy takes for a multicast to 1,000 devices, and for decisions with 10,000 nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from medusa_cluster.policy.chains import plan
from medusa_cluster.policy.decide import Memory, decide
from medusa_cluster.policy.decide import Options as PolicyOptions
from medusa_cluster.policy.state import ClusterState, Copy, Deployment, Instance, Load, Node
from medusa_runtime.load.factory.gc_freeze import freeze, thaw

from benchmarks.cluster.options import Options
from benchmarks.result_row import row

_DEVICES, _LAYERS = 1000, 80
_NODES, _MODELS = 10_000, 1000
_WAITING = 300  # models
_SIZE = 16_000_000_000


def rows(options: Options) -> list[dict[str, Any]]:
    """Measure the rows ``planner``, ``decisions`` and ``crowded``.

    The metric ``ms`` of ``decisions`` is the slowest decision of each run. Each kind of decision also has a metric.
    """
    found = []
    if options.wants("planner"):
        found.append(row("planner", "ms", "ms", [_timed(planner()) for _ in range(options.runs)]))
    if options.wants("decisions"):
        runs = [dict(decisions(_NODES, _MODELS)) for _ in range(options.runs)]
        found.append(row("decisions", "ms", "ms", [max(run.values()) for run in runs]))
        for name in runs[0]:
            found.append(row("decisions", f"{name}_ms", "ms", [run[name] for run in runs]))
    if options.wants("crowded"):
        found.append(row("crowded", "ms", "ms", [crowded(_NODES, _WAITING) for _ in range(options.runs)]))
    return found


def planner(devices: int = _DEVICES) -> Callable[[], object]:
    """Return a call that plans chains to all devices, and the sources from which each of them reads."""
    nodes = _nodes(devices + 20)
    sources, targets = nodes[:20], nodes[20:]

    def call() -> object:
        chains = plan(sources, targets)
        return [route for chain in chains for route in chain.routes()]

    return call


def decisions(nodes: int, models: int) -> Iterator[tuple[str, float]]:
    """Yield each kind of decision with its milliseconds, in a cluster that serves two thirds of its models."""
    state = cluster(nodes, models)
    memory = Memory()
    options = PolicyOptions(largest_group=4, live=True)
    now_s = 1000.0

    def tick(changed: ClusterState) -> float:
        nonlocal memory, now_s
        now_s += 0.1
        answer: list[Any] = []
        elapsed = _timed(lambda: answer.append(decide(changed, now_s, memory, options)))
        memory = answer[0][1]
        return elapsed

    yield "first", tick(state)  # as after a controller's restart
    yield "steady", tick(state)
    names = list(state.nodes)
    reported = dict(state.nodes)
    for name in names[:: len(names) // 1000 or 1]:
        reported[name] = _used(reported[name])
    state = replace(state, nodes=reported)
    yield "status_of_1000_nodes", tick(state)
    yield "status_of_all_nodes", tick(replace(state, nodes={name: _again(node) for name, node in reported.items()}))
    loads = dict(state.loads)
    loads["m1"] = Load(waiting=400, running=8, last_request_s=now_s)
    yield "burst_on_one_model", tick(replace(state, loads=loads))
    for number in range(100):
        loads[f"m{number}"] = Load(waiting=40, running=8, last_request_s=now_s)
    yield "burst_on_100_models", tick(replace(state, loads=loads))
    lost = dict(state.nodes)
    for name in names[: len(names) // 100]:
        lost[name] = replace(lost[name], state="lost")
    yield "death_of_100_nodes", tick(replace(state, nodes=lost))
    deployments = dict(state.deployments)
    for number in range(10):
        deployments[f"m{number}"] = replace(deployments[f"m{number}"], version="2")
    yield "new_versions_of_10_models", tick(replace(state, deployments=deployments))


def cluster(nodes: int, models: int) -> ClusterState:
    """Return a cluster in which each model has a copy, and two of three models serve on several nodes each."""
    deployments = {
        f"m{number}": Deployment(
            f"m{number}", f"s3://m{number}", size_bytes=_SIZE, version="1", layers=_LAYERS, max=64, concurrency=8
        )
        for number in range(models)
    }
    made = {}
    loads: dict[str, Load] = {}
    for number, node in enumerate(_nodes(nodes)):
        name = f"m{number % models}"
        serves = number % models % 3 != 2 and number < nodes // 2
        copies = (Copy(f"s3://{name}", _SIZE, _SIZE, "1", pinned=number < models),) if number < models or serves else ()
        instances = (Instance(f"i{number}", name, node.name, "ready", 0.0, running=6),) if serves else ()
        made[node.name] = replace(
            node, copies=copies, instances=instances, memory_used_bytes=sum(copy.total_bytes for copy in copies)
        )
        if serves:
            load = loads.get(name, Load())
            loads[name] = replace(load, running=load.running + 6, last_request_s=1000.0)
    return ClusterState(made, deployments, loads)


def crowded(nodes: int, waiting: int) -> float:
    """Return the milliseconds of a decision where each node's one device is taken, and other models wait for it."""
    deployments: dict[str, Deployment] = {}
    made, loads = {}, {}
    for number, node in enumerate(_nodes(nodes)):
        name = f"m{number}"
        deployments[name] = Deployment(name, f"s3://{name}", size_bytes=_SIZE + number, concurrency=8)
        copies = (Copy(f"s3://{name}", _SIZE + number, _SIZE + number, pinned=True),)
        instances = (Instance(f"i{number}", name, node.name, "ready", 990.0 - number % 60, running=2),)
        made[node.name] = replace(node, copies=copies, instances=instances, device_bytes=80 * 10**9)
        loads[name] = Load(running=2, last_request_s=1000.0)
    for number in range(nodes, nodes + waiting):
        name = f"m{number}"
        deployments[name] = Deployment(name, f"s3://{name}", size_bytes=_SIZE + number, concurrency=8)
        loads[name] = Load(3, longest_wait_s=float(number % 60), last_request_s=1000.0)
    state, memory, options = ClusterState(made, deployments, loads), Memory(), PolicyOptions(pool=False, live=True)
    for now_s in (1000.0, 1000.2):
        _, memory = decide(state, now_s, memory, options)
    return _timed(lambda: decide(state, 1000.4, memory, options))


def _again(node: Node) -> Node:
    """Return the node as a controller makes it anew when it parses a status: with equal copies and instances."""
    copies = tuple(replace(copy) for copy in node.copies)
    instances = tuple(replace(instance) for instance in node.instances)
    return replace(_used(node), copies=copies, instances=instances)


def _used(node: Node) -> Node:
    """Return the node with a little more of its memory in use: what most new statuses say."""
    return replace(node, memory_used_bytes=node.memory_used_bytes + 4096)


def _nodes(count: int) -> list[Node]:
    return [
        Node(
            f"n{number}",
            leaf=f"leaf {number % 250}",
            link_bytes_per_s=(12.5e9, 25e9, 6.25e9)[number % 3],
            memory_bytes=8 * _SIZE,
            devices=1,
        )
        for number in range(count)
    ]


def _timed(call: Callable[[], object]) -> float:
    """Return a call's CPU time in milliseconds, without collections of other parts' garbage.

    A decision never waits, so CPU time is enough.
    """
    freeze()
    try:
        begun = time.thread_time()
        call()
        return (time.thread_time() - begun) * 1000
    finally:
        thaw()
