"""Copies by a chain: the time for all nodes over that for one, what the origin sends, and how full each link is."""

from __future__ import annotations

import mmap
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_runtime.container_limits import memory_available_bytes
from medusa_runtime.errors import LabError
from medusa_runtime.region.pages import address_of, populate_write

from benchmarks.cluster.floor import bare_chain
from benchmarks.cluster.options import Options
from benchmarks.cluster.weight_nodes import WeightNode, weight_nodes
from benchmarks.result_row import row

_SETTLE_S = 1.0  # time for processes to end that a fetch or a drop leaves behind


def rows(options: Options) -> list[dict[str, Any]]:
    """Measure copies between nodes that do nothing else. Times count from the order to fetch."""
    models = {"model": options.model} | ({"large": options.large_model} if options.large_model else {})
    link = LinkSpeed(options.link_bytes_per_s)
    largest = max(sum(file.stat().st_size for file in folder.iterdir()) for folder in models.values())
    touch_memory(options.nodes * largest)
    found = []
    with (
        Laboratory(options.nodes, link, cpus=options.cpus, origin=models) as lab,
        weight_nodes(lab, tls=options.tls) as nodes,
    ):
        for name in models:
            suffix = "" if name == "model" else "_large"
            found += _measure(options, lab, nodes, f"{lab.origin_url}/{name}", suffix)
    return found


def touch_memory(size_bytes: int) -> None:
    """Use this much memory once, or as much of it as is free.

    A virtual machine gets a page of memory from its host when it first uses it. On the machine of
    docs/benchmarks/clusters.md that takes up to 4 CPU seconds per GB, several times what pages cost later.
    """
    size_bytes = min(size_bytes, memory_available_bytes() // 4 * 3)
    with mmap.mmap(-1, size_bytes) as memory, memoryview(memory) as view:
        populate_write(address_of(view), size_bytes)


def _measure(options: Options, lab: Laboratory, nodes: list[WeightNode], url: str, suffix: str) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    ratio = f"ratio_{options.nodes}_to_2"
    for _ in range(options.runs):
        settle(nodes)
        before = lab.origin_sent_bytes
        _, first = fetch(nodes[:1], url)
        size_bytes = first[0]["total_bytes"]
        two_s, _ = fetch(nodes[1:2], url, sources=nodes[:1])
        nodes[1].ask("drop", url=url)
        settle(nodes)
        began_s = cpu_seconds(lab)
        all_s, copies = fetch(nodes[1:], url, sources=nodes[:1])
        time.sleep(_SETTLE_S)
        busy_s = cpu_seconds(lab) - began_s
        settle(nodes)
        ahead_s = cpu_seconds(lab) - began_s - busy_s
        sent = lab.origin_sent_bytes - before
        for node in reversed(nodes):
            node.ask("drop", url=url)
        time.sleep(_SETTLE_S)
        bare_two, bare_all = (bare_chain(lab, lab.nodes[:count], size_bytes) for count in (2, options.nodes))
        gigabytes = size_bytes * (options.nodes - 1) / 1e9
        found["chain", ratio].append(all_s / two_s)
        found["chain", "two_s"].append(two_s)
        found["chain", "all_s"].append(all_s)
        found["floor", "ratio_over_floor"].append(all_s / two_s / (bare_all.seconds / bare_two.seconds))
        found["origin", "sent_ratio"].append(sent / size_bytes)
        found["hop", "link_share"] += [copy["bytes_per_s"] / options.link_bytes_per_s for copy in copies]
        found["hop", "cpu_s_per_gb"].append(busy_s / gigabytes)
        found["hop", "ahead_cpu_s_per_gb"].append(ahead_s / gigabytes)
        found["floor", ratio].append(bare_all.seconds / bare_two.seconds)
        found["floor", "all_s"].append(bare_all.seconds)
        found["floor", "link_share"] += [rate / options.link_bytes_per_s for rate in bare_all.bytes_per_s]
        found["floor", "cpu_s_per_gb"].append(bare_all.cpu_s / gigabytes)
    return [
        row(name, f"{metric}{suffix}", "s" if metric.endswith("_s") else "", samples)
        for (name, metric), samples in found.items()
    ]


def settle(nodes: Sequence[WeightNode]) -> None:
    """Wait until old processes have ended, and all nodes have memory ready for the next model."""
    time.sleep(_SETTLE_S)
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: node.ask("ready"), nodes))


def cpu_seconds(lab: Laboratory) -> float:
    """Sum the CPU time of all processes of the nodes, and of their children that have ended."""
    return sum(cpu_seconds_of(pid) for node in lab.nodes for pid in lab.processes(node))


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended; 0 if the process itself has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def fetch(
    targets: Sequence[WeightNode], url: str, sources: Sequence[WeightNode] = ()
) -> tuple[float, list[dict[str, Any]]]:
    """Fetch a model by a chain. Each node reads from those before it, the first from ``sources`` or else the origin.

    Return the seconds until all copies are complete, and each node's report about its copy. Raises LabError if a copy
    is not complete.
    """
    chain = [*sources, *targets]
    for place, node in enumerate(chain):
        node.ask("plan", sources=[before.url for before in reversed(chain[:place])])
    with ExitStack() as stack:
        orders = [stack.enter_context(node.connect()) for node in targets]
        began = time.monotonic()
        for order in orders:
            order.send("fetch", url=url)
        copies = [order.answer() for order in orders]
    for node, copy in zip(targets, copies, strict=True):
        if copy["state"] != "DONE":
            raise LabError(f"{node.name} has not got the model: its region is {copy['state']}")
    return max(copy["ended_s"] for copy in copies) - began, copies
