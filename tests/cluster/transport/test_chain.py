"""Chains of real nodes: each reads from the one before it, and the origin sends one copy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from medusa_runtime.errors import MedusaError
from peer_nodes import Model, Node, percent
from slow_origin import SlowAfterAWhile, SlowOrigin, serving_origin
from waiting import until

PACE = 6_000_000  # bytes a second: two seconds for the model
ENDED_S = 60.0  # longer than a fetch tries without any bytes
LAST = "model.layers.11.weight"


def test_a_chain_brings_every_node_the_bytes_and_the_origin_sends_them_once(
    nodes: Callable[..., list[Node]], model: Model
) -> None:
    first, second, third = nodes(3)
    second.read_from(first)
    third.read_from(second, first)
    regions = [node.fetch(model.url) for node in (first, second, third)]
    for region in regions:
        model.check(region)
    assert regions[2].file("config.json") == b'{"model_type": "random"}'
    assert regions[2].file("tokenizer.json") == b"{}" * 1000
    assert model.copies() < 1.05
    assert third.held()["sources"]["received_bytes"] == {second.url: len(model.data), first.url: 0, "store": 0}


def test_a_chain_may_begin_with_its_end(nodes: Callable[..., list[Node]], model: Model) -> None:
    chain = nodes(3)
    for place, node in enumerate(chain):
        node.read_from(*reversed(chain[:place]))
    with ThreadPoolExecutor(3) as threads:
        fetches = []
        for node in reversed(chain):
            fetches.append(threads.submit(node.fetch, model.url))
            time.sleep(0.2)
        for fetch in fetches:
            model.check(fetch.result())
    assert model.copies() < 1.05
    assert [node.held()["sources"]["received_bytes"]["store"] for node in chain] == [len(model.data), 0, 0]


def test_what_a_forward_waits_for_comes_before_the_rest_of_a_large_range(
    nodes: Callable[..., list[Node]], large_model: Model
) -> None:
    first, second = nodes(2)
    large_model.check(first.fetch(large_model.url))
    first.ask("pace", bytes_per_s=PACE)
    second.read_from(first)
    region = second.fetch(large_model.url)
    until(lambda: percent(region) > 5)
    region.demand([LAST])
    region.wait_tensor(LAST, timeout_s=60)
    assert percent(region) < 60  # the rest of a batch, 8 MiB that were asked for before, and what is wanted
    first.ask("pace", bytes_per_s=None)
    large_model.check(region)
    received = second.held()["sources"]["received_bytes"]
    assert received == {first.url: len(large_model.data), "store": 0}


@pytest.mark.parametrize("at", [10, 50, 90])
def test_a_relay_that_is_killed_costs_only_its_hop(nodes: Callable[..., list[Node]], model: Model, at: int) -> None:
    first, second, third = nodes(3)
    model.check(first.fetch(model.url))
    before = model.copies()  # a busy machine may have asked the origin for a late range twice
    first.ask("pace", bytes_per_s=PACE / 2)
    second.read_from(first)
    third.read_from(second, first)
    second.fetch(model.url)
    region = third.fetch(model.url)
    until(lambda: percent(region) >= at - 5)
    first.ask("pace", bytes_per_s=PACE / 10)  # so that the signal comes in time where others use the machine
    until(lambda: percent(region) >= at)
    second.signal(signal.SIGKILL)
    first.ask("pace", bytes_per_s=PACE)
    model.check(region)
    assert model.copies() - before < 0.05
    received = third.held()["sources"]["received_bytes"]
    assert received[second.url] > 0
    assert received[first.url] > 0
    assert received["store"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("who", ["relay", "its server", "its prefetcher"])
def test_a_relay_that_is_stopped_costs_only_its_hop(nodes: Callable[..., list[Node]], model: Model, who: str) -> None:
    first, second, third = nodes(3)
    model.check(first.fetch(model.url))
    first.ask("pace", bytes_per_s=PACE)
    second.read_from(first)
    third.read_from(second, first)
    second.fetch(model.url)
    region = third.fetch(model.url)
    until(lambda: percent(region) >= 30)
    stopped = {"relay": second.processes(), "its server": [second.server.pid], "its prefetcher": [second.prefetcher()]}
    for pid in stopped[who]:
        os.kill(pid, signal.SIGSTOP)
    model.check(region)
    assert model.copies() < 1.05


@pytest.mark.parametrize("end", ["the origin", "a node", "a node that dies", "nothing"])
def test_nodes_that_read_from_one_another_end_with_right_bytes_or_an_error(
    nodes: Callable[..., list[Node]], model: Model, end: str
) -> None:
    first, second, third = nodes(3)
    pair, sources = [first, second], [third] if "node" in end else []
    if sources:
        model.check(third.fetch(model.url))
        third.ask("pace", bytes_per_s=PACE)
    if end in ("a node", "nothing"):
        model.origin.__exit__(None, None, None)
    first.read_from(second, *sources)
    second.read_from(first, *sources)
    with ThreadPoolExecutor(2) as threads:
        fetches = [threads.submit(_fetch, node, model) for node in pair]
        if end == "a node that dies":
            until(lambda: all(percent(node.fetch(model.url)) > 20 for node in pair))
            third.signal(signal.SIGKILL)
        for fetch in fetches:
            assert fetch.result(ENDED_S) == (end != "nothing")


def _fetch(node: Node, model: Model) -> bool:
    """Return whether a node gets the model; False when its fetch ends with an error."""
    try:
        region = node.fetch(model.url)
    except MedusaError:
        return False
    until(lambda: region.progress().state in ("done", "failed"))
    if region.progress().state == "failed":
        return False
    model.check(region)
    return True


def test_one_that_joins_late_gets_what_is_there_at_once(nodes: Callable[..., list[Node]], model: Model) -> None:
    first, second, third = nodes(3)
    model.check(first.fetch(model.url))
    first.ask("pace", bytes_per_s=PACE)
    second.read_from(first)
    relay = second.fetch(model.url)
    until(lambda: percent(relay) >= 50)
    third.read_from(second, first)
    region = third.fetch(model.url)
    model.check(region)
    model.check(relay)
    assert third.held()["sources"]["received_bytes"][first.url] == 0
    assert first.ask("sources") == []


def test_one_that_leaves_costs_the_others_nothing(nodes: Callable[..., list[Node]], model: Model) -> None:
    first, second, third = nodes(3)
    model.check(first.fetch(model.url))
    first.ask("pace", bytes_per_s=PACE)
    for node, sources in ((second, [first]), (third, [second, first])):
        node.read_from(*sources)
    relay, last = second.fetch(model.url), third.fetch(model.url)
    until(lambda: percent(last) >= 20)
    third.signal(signal.SIGKILL)
    model.check(relay)
    assert second.held()["sources"] == {"received_bytes": {first.url: len(model.data), "store": 0}, "excluded": {}}


def test_a_peer_serves_while_the_origin_is_down(nodes: Callable[..., list[Node]], model: Model) -> None:
    first, second = nodes(2)
    model.check(first.fetch(model.url))
    model.origin.__exit__(None, None, None)
    second.read_from(first)
    model.check(second.fetch(model.url))


def test_an_agent_without_its_node_server_fetches_from_the_origin(
    nodes: Callable[..., list[Node]], model: Model
) -> None:
    (node,) = nodes(1)
    node.server.kill()
    node.server.wait()
    model.check(node.fetch(model.url))
    assert "does not say which nodes have it" in node.output()


def test_a_node_server_that_hangs_costs_half_a_second(nodes: Callable[..., list[Node]], model: Model) -> None:
    (node,) = nodes(1)
    os.kill(node.server.pid, signal.SIGSTOP)
    model.check(node.fetch(model.url))
    assert "does not say which nodes have it" in node.output()


@pytest.fixture
def slow(model: Model) -> Iterator[SlowOrigin]:
    """An origin of the model that needs 13 seconds for each chunk, after the first of them."""
    with serving_origin(model.file.parent, 1e9, SlowAfterAWhile) as origin:
        assert isinstance(origin, SlowAfterAWhile)
        origin.bytes_per_s, origin.fast_bytes = 1, 2e6  # slow, but for the index
        yield origin


def received(node: Node) -> dict[str, int]:
    found: dict[str, int] = node.held().get("sources", {}).get("received_bytes", {})
    return found


def test_a_chain_reads_a_slow_origin_once(nodes: Callable[..., list[Node]], model: Model, slow: SlowOrigin) -> None:
    first, second = nodes(2)
    second.read_from(first)
    regions = [first.fetch(slow.url)]  # laid out
    regions.append(second.fetch(slow.url))
    until(lambda: received(second).get(first.url))  # which is shown while the weights come
    began = time.monotonic()
    while time.monotonic() - began < 8:
        assert received(second)["store"] == 0
        time.sleep(0.2)
    assert second.held()["state"] == "fetching"
    slow.bytes_per_s = 1e9
    for region in regions:
        model.check(region)
    assert received(second) == {first.url: len(model.data), "store": 0}, second.held()


def test_who_reads_the_origin_alone_turns_to_a_peer_when_it_fails(
    nodes: Callable[..., list[Node]], model: Model, slow: SlowOrigin
) -> None:
    first, second = nodes(2)
    slow.bytes_per_s = 1e9
    model.check(first.fetch(slow.url))
    slow.sent, slow.bytes_per_s = 0, 1
    region = second.fetch(slow.url)  # no peer has it, says its plan
    until(lambda: percent(region) > 5)
    second.read_from(first)
    slow.down = True
    model.check(region)
    assert received(second)[first.url] > 0.5 * len(model.data)


@pytest.mark.slow
def test_who_reads_a_slow_origin_turns_to_a_peer_that_has_more(
    nodes: Callable[..., list[Node]], model: Model, slow: SlowOrigin
) -> None:
    first, second = nodes(2)
    second.read_from(first)
    slow.bytes_per_s = 1e9
    model.check(first.fetch(slow.url))
    slow.sent, slow.bytes_per_s = 0, 1
    first.server.send_signal(signal.SIGSTOP)
    region = second.fetch(slow.url)
    until(lambda: received(second).get("store"))
    first.server.send_signal(signal.SIGCONT)
    model.check(region)
    assert received(second)[first.url] > 0.5 * len(model.data)
