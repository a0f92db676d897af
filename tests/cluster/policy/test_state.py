"""What the policy's dataclasses derive."""

from __future__ import annotations

from medusa_cluster.policy.state import Copy, Instance, Node


def test_a_copy_is_complete_when_all_bytes_of_all_layers_are_there() -> None:
    assert Copy("u", 10, 10).is_complete
    assert not Copy("u", 10, 9).is_complete
    assert not Copy("u", 10, 10, layers=(0, 4)).is_complete
    assert not Copy("u", 0, 0).is_complete  # nothing is known about it yet


def test_a_node_without_accelerators_runs_one_instance() -> None:
    node = Node("a", memory_bytes=10, memory_used_bytes=4)
    assert (node.slots, node.free_slots(), node.free_bytes) == (1, 1, 6)
    busy = Node("a", devices=4, instances=(Instance("i", "m", "a", "ready"),))
    assert (busy.slots, busy.free_slots()) == (4, 3)
    assert Node("a", devices=4, state="draining").free_slots() == 0
