"""What the comparison with transformers does not reach: distances, and several sequences in one batch."""

from __future__ import annotations

from typing import Any

import torch
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.rope import Rope, RopeConfig


def rope(**parameters: Any) -> Rope:
    fields = Fields({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0} | parameters})
    return Rope(RopeConfig.read(fields, head_dim=16, max_positions=10))


def test_products_depend_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def product(q_position: int, k_position: int) -> float:
        turn = [rope().rotation(torch.tensor([place]), torch.float64) for place in (q_position, k_position)]
        return float((turn[0](q.double(), k.double())[0] * turn[1](q.double(), k.double())[1]).sum())

    assert abs(product(7, 3) - product(5004, 5000)) < 1e-3
    assert abs(product(7, 3) - product(7, 4)) > 1e-3


def test_dynamic_scaling_does_nothing_up_to_the_longest_sequence() -> None:
    """It is meant for longer sequences than the engine takes."""
    positions = torch.tensor([3, 4, 8, 9])
    dynamic, plain = (one.rotation(positions, torch.float32) for one in (rope(rope_type="dynamic", factor=2.0), rope()))
    assert torch.equal(dynamic.cos, plain.cos)
