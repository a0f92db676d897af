"""Copies by a chain: how much longer eight take than two, what the origin sends, and how full each link is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link import Link
from medusa_runtime.errors import LabError

from benchmarks.cluster.options import Options, row
from benchmarks.cluster.weight_nodes import WeightNode, weight_nodes


def rows(options: Options) -> list[dict[str, Any]]:
    """Measure copies with nodes that have nothing else to do; times count from the order to fetch."""
    models = {"model": options.model} | ({"large": options.large_model} if options.large_model else {})
    link = Link(options.link_bytes_per_s)
    found = []
    with Laboratory(options.nodes, link, cpus=options.cpus, origin=models) as lab, weight_nodes(lab) as nodes:
        for name in models:
            suffix = "" if name == "model" else "_large"
            found += _measure(options, lab, nodes, f"{lab.origin_url}/{name}", suffix)
    return found


def _measure(options: Options, lab: Laboratory, nodes: list[WeightNode], url: str, suffix: str) -> list[dict[str, Any]]:
    two_s, all_s, ratios, sent, shares = [], [], [], [], []
    for _ in range(options.runs):
        before = lab.origin_sent_bytes
        _, first = fetch(nodes[:1], url)
        seconds, _ = fetch(nodes[1:2], url, sources=nodes[:1])
        two_s.append(seconds)
        nodes[1].ask("drop", url=url)
        seconds, copies = fetch(nodes[1:], url, sources=nodes[:1])
        all_s.append(seconds)
        ratios.append(seconds / two_s[-1])
        sent.append((lab.origin_sent_bytes - before) / first[0]["total_bytes"])
        shares += [copy["bytes_per_s"] / options.link_bytes_per_s for copy in copies]
        for node in reversed(nodes):
            node.ask("drop", url=url)
    return [
        row("chain", f"ratio_{options.nodes}_to_2{suffix}", "", ratios),
        row("chain", f"two_s{suffix}", "s", two_s),
        row("chain", f"all_s{suffix}", "s", all_s),
        row("origin", f"sent_ratio{suffix}", "", sent),
        row("hop", f"link_share{suffix}", "", shares),
    ]


def fetch(
    targets: Sequence[WeightNode], url: str, sources: Sequence[WeightNode] = ()
) -> tuple[float, list[dict[str, Any]]]:
    """Fetch a model as a chain: each node from those before it, the first from ``sources`` or else the origin.

    Returns the seconds until all are complete, and what each node says of its copy.
    """
    chain = [*sources, *targets]
    for place, node in enumerate(chain):
        node.ask("plan", sources=[before.url for before in reversed(chain[:place])])
    began = time.monotonic()
    with ThreadPoolExecutor(len(targets)) as pool:
        copies = list(pool.map(lambda node: node.ask("fetch", url=url), targets))
    for node, copy in zip(targets, copies, strict=True):
        if copy["state"] != "DONE":
            raise LabError(f"{node.name} has not got the model: its region is {copy['state']}")
    return max(copy["ended_s"] for copy in copies) - began, copies
