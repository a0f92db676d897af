"""Chains of real nodes: each reads from the one before it, and the origin sends one copy."""

from __future__ import annotations

from collections.abc import Callable

from peer_nodes import Model, Node


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
