"""The recorded execution order, and what names alone tell of it."""

from __future__ import annotations

import torch
from medusa_runtime.checkpoint.index import Shard, TensorEntry, WeightIndex
from medusa_runtime.checkpoint.order import execution_order
from medusa_runtime.load.trace import record_execution_order
from torch import Tensor, nn


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.unused = nn.Linear(1, 1)
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layers[2].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = nn.functional.linear(x, layer.weight)
        return torch.as_tensor(self.last(self.norm(self.tied(x))))


ORDER = [
    *(f"layers.{number}.weight" for number in (2, 1, 0)),
    *(f"norm.{name}" for name in ("running_mean", "running_var", "weight", "bias")),
    *("last.weight", "last.bias"),
]


def test_a_forward_shows_the_order() -> None:
    order = record_execution_order(Backwards().eval(), torch.zeros(2, 4))
    assert order[:9] == ORDER
    assert {"unused.weight", "unused.bias", "norm.num_batches_tracked"} < set(order[9:])


def test_an_index_takes_a_recorded_order() -> None:
    names = ["a", "b", "c"]
    entries = {name: TensorEntry(0, n, n + 1, "U8", (1,)) for n, name in enumerate(names)}
    index = WeightIndex([Shard("s", 3, 0)], entries)
    assert index.reordered(["c", "nowhere", "a"]).order == ("c", "a", "b")
    assert WeightIndex.from_json(index.reordered(["c"]).to_json()).order == ("c", "a", "b")


def test_names_of_convolutional_stages() -> None:
    expected = [
        *("bn1.weight", "conv1.weight"),
        *(f"layer1.{n}.conv1.weight" for n in range(11)),
        *(f"layer2.{n}.conv1.weight" for n in range(2)),
        "fc.weight",
    ]
    stages = ["stages.0.blocks.2.w", "stages.0.blocks.10.w", "stages.1.blocks.0.w", "head.fc.weight"]
    both = ["shared.weight", "encoder.block.0.w", "encoder.block.1.w", "decoder.block.0.w", "lm_head.weight"]
    for names in (expected, stages, both):
        placed = {name: TensorEntry(0, n, n, "U8", (0,)) for n, name in enumerate(sorted(names))}
        assert execution_order(placed) == names


def test_heads_of_several_layers_and_files_sorted_by_type() -> None:
    vgg = [*(f"features.{n}.weight" for n in (0, 2, 10, 28)), *(f"classifier.{n}.weight" for n in (0, 3, 6))]
    placed = {name: TensorEntry(0, n, n, "U8", (0,)) for n, name in enumerate(sorted(vgg))}
    assert execution_order(placed) == vgg
    # safetensors puts the larger elements first: counters of norms, then all else, from the stem on.
    counters = ["bn1.num_batches_tracked", "layer4.2.bn3.num_batches_tracked"]
    floats = ["bn1.weight", "conv1.weight", "fc.weight", "layer1.0.conv1.weight", "layer4.2.bn3.weight"]
    typed = [(name, "I64") for name in counters] + [(name, "F32") for name in floats]
    placed = {name: TensorEntry(0, n, n, dtype, (0,)) for n, (name, dtype) in enumerate(typed)}
    assert execution_order(placed) == [
        *("bn1.num_batches_tracked", "bn1.weight", "conv1.weight", "layer1.0.conv1.weight"),
        *("layer4.2.bn3.num_batches_tracked", "layer4.2.bn3.weight", "fc.weight"),
    ]


def test_a_recorded_order_is_told_from_one_that_was_read() -> None:
    index = WeightIndex([Shard("s", 3, 0)], {name: TensorEntry(0, 0, 1, "U8", (1,)) for name in "abc"})
    assert not index.recorded
    assert index.reordered(["c"]).recorded
    assert WeightIndex.from_json(index.reordered(["c"]).to_json()).recorded
    assert not WeightIndex.from_json(index.to_json()).recorded
