"""Flows that share links."""

from __future__ import annotations

import pytest
from medusa_cluster.simulation.network import Flow, Link, Network, call_after

simpy = pytest.importorskip("simpy")


class Wire:
    def __init__(self) -> None:
        self.env = simpy.Environment()
        self.network = Network(self.env)
        self.ended: dict[str, float] = {}

    def start(self, name: str, links: list[Link], size: float, upstream: Flow | None = None) -> Flow:
        return self.network.start(links, size, lambda: self.ended.__setitem__(name, self.env.now), upstream)


def test_flows_share_a_link_equally_and_gain_when_one_ends() -> None:
    wire, link = Wire(), Link(100)
    wire.start("small", [link], 100)
    wire.start("large", [link], 300)
    wire.env.run()
    assert wire.ended == {"small": pytest.approx(2), "large": pytest.approx(4)}


def test_the_narrowest_link_counts() -> None:
    wire, shared = Wire(), Link(100)
    wire.start("a", [shared, Link(10)], 100)
    wire.start("b", [shared, Link(100)], 100)
    wire.env.run()
    assert wire.ended == {"a": pytest.approx(10), "b": pytest.approx(2)}


def test_a_chain_arrives_as_fast_as_its_slowest_link() -> None:
    wire = Wire()
    first = wire.start("a", [Link(100), Link(100)], 1000)
    second = wire.start("b", [Link(100), Link(50)], 1000, first)
    wire.start("c", [Link(50), Link(100)], 1000, second)
    wire.env.run()
    assert wire.ended == {"a": pytest.approx(10), "b": pytest.approx(20), "c": pytest.approx(20)}


def test_a_follower_catches_up_and_then_follows() -> None:
    wire = Wire()
    first = wire.start("slow", [Link(10)], 100)
    call_after(wire.env, 5, lambda: wire.start("fast", [Link(20)], 100, first) and None)
    wire.env.run()
    assert wire.ended == {"slow": pytest.approx(10), "fast": pytest.approx(10)}


def test_a_flow_whose_source_is_stopped_goes_on_alone() -> None:
    wire = Wire()
    first = wire.start("first", [Link(10)], 100)
    wire.start("second", [Link(100)], 100, first)
    call_after(wire.env, 5, lambda: wire.network.stop(first))
    wire.env.run()
    assert wire.ended == {"second": pytest.approx(5.5)}
