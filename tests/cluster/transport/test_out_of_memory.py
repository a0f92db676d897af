"""The kernel's kill for want of memory, of each process of a node that passes weights on: others go round it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest
from medusa_runtime.node.client import NodeClient
from memory_group import MemoryGroup, group
from peer_nodes import Model, Node, percent, until
from process_tree import alive

__all__ = ["group"]

SLOWLY = 200_000  # bytes a second, for as long as the memory is used up
PACE = 20_000_000
NAMED = "memory ran out, the limit is "

pytestmark = [pytest.mark.slow, pytest.mark.root]


def victim_of(node: Node, name: str) -> int:
    return {"server": lambda: node.server.pid, "agent": lambda: node.agent.pid, "prefetcher": node.prefetcher}[name]()


def bring_back(node: Node, name: str) -> None:
    """Start again what the machine's supervisor would; a prefetcher is the agent's."""
    if name == "server":
        assert node.server.wait(30) == -signal.SIGKILL
        assert node.server.stdout
        node.server.stdout.close()
        node.start_server()
    elif name == "agent":
        assert node.agent.wait(30) == -signal.SIGKILL
        node.start_agent()
    else:
        assert f"its prefetcher ended early (killed by SIGKILL: {NAMED}" in node.output()


@pytest.mark.parametrize("name", ["server", "agent", "prefetcher"])
@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_a_relay(group: MemoryGroup, nodes: Callable[..., list[Node]], model: Model, name: str) -> None:
    (first,), (second,), (third,) = nodes(1), nodes(1, wrapper=group.inside), nodes(1)
    model.check(first.fetch(model.url))
    before = model.copies()
    first.ask("pace", bytes_per_s=PACE / 10)
    second.read_from(first)
    third.read_from(second, first)
    second.fetch(model.url).close()
    region = third.fetch(model.url)
    until(lambda: percent(region) >= 10)
    first.ask("pace", bytes_per_s=SLOWLY)
    victim = victim_of(second, name)
    group.kill(victim)
    until(lambda: not alive(victim))
    first.ask("pace", bytes_per_s=PACE)
    model.check(region)
    assert model.copies() - before < 0.1
    received = third.held()["sources"]["received_bytes"]
    assert received[second.url] > 0
    assert received[first.url] > 0
    bring_back(second, name)
    second.read_from(first)
    model.check(second.fetch(model.url))
    check_nothing_is_left(group, second)


@pytest.mark.parametrize("name", ["server", "agent"])
@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_the_only_peer(group: MemoryGroup, nodes: Callable[..., list[Node]], model: Model, name: str) -> None:
    """The rest comes from the store."""
    (first,), (second,) = nodes(1, wrapper=group.inside), nodes(1)
    model.check(first.fetch(model.url))
    first.ask("pace", bytes_per_s=PACE / 10)
    second.read_from(first)
    region = second.fetch(model.url)
    until(lambda: percent(region) >= 10)
    first.ask("pace", bytes_per_s=SLOWLY)
    group.kill(victim_of(first, name))
    if name == "server":
        model.check(region)
        assert second.held()["sources"]["received_bytes"]["store"] > 0
        bring_back(first, name)
    else:
        bring_back(first, name)  # the server goes on with the region that it has open, or from the next agent
        first.ask("pace", bytes_per_s=PACE)
        model.check(region)
    model.check(first.fetch(model.url))
    check_nothing_is_left(group, first)


def check_nothing_is_left(group: MemoryGroup, node: Node) -> None:
    assert group.kills() == 1
    open_before = len(os.listdir(f"/proc/{node.server.pid}/fd"))
    for client in node.clients:
        client.close()
    with contextlib.closing(NodeClient(node.socket)) as client:
        url = client.status()["regions"][0]["url"]
        deadline = time.monotonic() + 30
        until(lambda: NodeClient(node.socket).status()["regions"][0]["in_use_by"] == 0 or time.monotonic() > deadline)
        client.drop(url)
    assert len(os.listdir(f"/proc/{node.server.pid}/fd")) <= open_before
    node.close()
    until(lambda: group.shared_bytes() == 0, lambda: f"{group.shared_bytes()} bytes of shared memory")
