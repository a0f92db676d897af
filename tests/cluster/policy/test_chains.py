"""Multicast plans: who reads from whom."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from medusa_cluster.policy.chains import Chain, plan
from medusa_cluster.policy.state import Node


def node(name: str, rate: float = 100.0, leaf: str = "", domain: str = "") -> Node:
    return Node(name, link_bytes_per_s=rate, leaf=leaf, fast_domain=domain)


def arrival_s(chain: Chain, name: str, size_bytes: int, rates: dict[str, float], chunk_bytes: int) -> float:
    """When a target has everything: M/min(b₁…b_k) + Σ_{j<k} c/b_j. ``rates``: each node's bytes a second."""
    position = next(number for number, group in enumerate(chain.groups) if number and name in group)
    steps = [sum(rates[member] for member in group) for group in chain.groups[: position + 1]]
    links = [min(before, after) for before, after in pairwise(steps)]
    return size_bytes / min(links) + sum(chunk_bytes / link for link in links[:-1])


def rows(chains: tuple[Chain, ...]) -> list[str]:
    return ["→".join("+".join(group) or "store" for group in chain.groups) for chain in chains]


def test_each_leaf_has_its_own_chain_in_falling_order_of_bandwidth() -> None:
    sources = [node("s0", leaf="A"), node("s1", leaf="B")]
    targets = [node("a2", 50, "A"), node("b1", leaf="B"), node("a1", leaf="A")]
    assert rows(plan(sources, targets)) == ["s0→a1→a2", "s1→b1"]


def test_fast_targets_come_before_slow_ones_so_that_those_do_not_wait() -> None:
    (chain,) = plan([node("s")], [node("t2", 50), node("t1", 100)])
    assert rows((chain,)) == ["s→t1→t2"]
    rates = {"s": 100.0, "t1": 100.0, "t2": 50.0}
    assert arrival_s(chain, "t1", 1000, rates, 0) == pytest.approx(10)
    assert arrival_s(chain, "t2", 1000, rates, 0) == pytest.approx(20)
    worse = Chain((("s",), ("t2",), ("t1",)), 50)
    assert arrival_s(worse, "t1", 1000, rates, 0) == arrival_s(worse, "t2", 1000, rates, 0) == pytest.approx(20)
    assert arrival_s(chain, "t2", 1000, rates, 10) == pytest.approx(20.1)  # and one chunk for the hop before it


def test_links_that_serve_are_left_out() -> None:
    sources = [replace(node("busy"), serves_out=True), node("idle")]
    targets = [replace(node("t1"), serves_in=True), node("t2"), replace(node("gone"), state="lost")]
    assert rows(plan(sources, targets)) == ["idle→t2"]


def test_without_a_source_the_store_sends_the_model_once() -> None:
    (chain,) = plan([], [node("b", 50), node("a", 100), node("c", 50)])
    assert rows((chain,)) == ["store→a→b→c"]
    routes = dict(chain.routes())
    assert (routes["a"], routes["c"]) == ((), ("b", "a"))
    assert chain.bytes_per_s == 50


def test_no_target_has_the_model() -> None:
    assert rows(plan([node("s")], [node("s"), node("a"), node("b")])) == ["s→a→b"]
    assert plan([node("s")], []) == ()


def test_idle_sources_share_the_targets_and_those_that_have_everything_come_first() -> None:
    sources = [node("s1"), node("s2")]
    assert rows(plan(sources, [node("a"), node("b")])) == ["s1→a", "s2→b"]
    assert rows(plan(sources, [node("a")], arriving={"s1"})) == ["s2→a"]


def test_a_group_follows_a_group() -> None:
    sources = [node("s1", domain="S"), node("s2", domain="S")]
    targets = [node("a1", domain="A"), node("a2", domain="A"), node("b")]
    (chain,) = plan(sources, targets)
    assert rows((chain,)) == ["s1+s2→a1+a2→b"]
    routes = dict(chain.routes())
    assert (routes["a1"], routes["a2"]) == (("s1", "s2"), ("s2", "s1"))
    assert chain.bytes_per_s == 100


def test_a_target_may_turn_to_those_before_it() -> None:
    (longer,) = plan([node("s")], [node("a"), node("b"), node("c"), node("d", 25)])
    assert dict(longer.routes())["d"] == ("c", "b", "a", "s")
    assert longer.bytes_per_s == 25


NODES = st.lists(
    st.builds(
        lambda rate, leaf, domain: (rate, leaf, domain),
        st.sampled_from([12.5, 25.0, 100.0]),
        st.sampled_from(["", "A", "B"]),
        st.sampled_from(["", "", "X", "Y"]),
    ),
    max_size=20,
)


@given(NODES, NODES)
def test_every_target_is_placed_once_behind_what_it_reads(
    sources: list[tuple[float, str, str]], targets: list[tuple[float, str, str]]
) -> None:
    held = [node(f"s{number}", *item) for number, item in enumerate(sources)]
    wanted = [node(f"t{number}", *item) for number, item in enumerate(targets)]
    chains = plan(held, wanted)
    placed = [name for chain in chains for name in chain.targets]
    assert len(placed) == len(set(placed)) == len(wanted)
    assert plan(held, wanted) == chains  # deterministic
    used = [name for chain in chains for name in chain.groups[0]]
    assert len(used) == len(set(used))  # a source is in one chain
    for chain in chains:
        routes = dict(chain.routes())
        assert tuple(routes) == chain.targets
        for name, before in routes.items():
            assert name not in before
            assert all(name not in routes[other] for other in before if other in routes)
