"""The kernel's kill for want of memory, of the server of a node that passes weights on: others go round it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

import pytest
from memory_group import MemoryGroup, group
from peer_nodes import Model, Node, percent
from process_tree import alive
from waiting import until

__all__ = ["group"]

SLOWLY = 200_000  # bytes a second, for as long as the memory is used up
PACE = 20_000_000

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_the_server_of_a_relay(group: MemoryGroup, nodes: Callable[..., list[Node]], model: Model) -> None:
    (first,), (second,), (third,) = nodes(1), nodes(1, wrapper=group.inside), nodes(1)
    check_fetch(first, model)
    first.ask("pace", bytes_per_s=PACE / 10)
    second.read_from(first)
    third.read_from(second, first)
    second.fetch(model.url).close()
    region = third.fetch(model.url)
    until(lambda: percent(region) >= 10)
    first.ask("pace", bytes_per_s=SLOWLY)
    victim = second.server.pid
    group.kill(victim)
    until(lambda: not alive(victim))
    first.ask("pace", bytes_per_s=PACE)
    model.check(region)
    received = third.held()["sources"]["received_bytes"]
    assert received[second.url] > 0
    assert received[first.url] > 0
    assert second.server.wait(30) == -signal.SIGKILL
    assert second.server.stdout
    second.server.stdout.close()
    second.start_server()
    second.read_from(first)
    check_fetch(second, model)
    region.close()
    check_nothing_is_left(group, second)


def check_fetch(node: Node, model: Model) -> None:
    with contextlib.closing(node.fetch(model.url)) as region:
        model.check(region)


def check_nothing_is_left(group: MemoryGroup, node: Node) -> None:
    assert group.kills() == 1
    for client in node.clients:
        client.close()
    node.close()
    until(lambda: group.shared_bytes() == 0, lambda: f"{group.shared_bytes()} bytes of shared memory")
