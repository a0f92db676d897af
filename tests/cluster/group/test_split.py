"""Layers are shared among workers so that the one with the most bytes has as few as possible."""

from __future__ import annotations

import itertools
import random

import pytest
from engine_fixtures import fill_region
from medusa_cluster.group.ranges import ModelBytes, layer_settings, split
from medusa_runtime.errors import ConfigError


def largest(model: ModelBytes, ranges: list[tuple[int, int]]) -> int:
    sizes = [sum(model.layers[start:stop]) for start, stop in ranges]
    sizes[0] += model.entry
    sizes[-1] += model.exit
    return max(sizes)


def test_no_other_split_has_a_smaller_largest_part() -> None:
    dice = random.Random(5)
    for _ in range(60):
        count = dice.randint(1, 8)
        model = ModelBytes(dice.randint(0, 30), tuple(dice.randint(1, 20) for _ in range(count)), dice.randint(0, 30))
        for size in range(1, count + 1):
            found = split(model, size)
            assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
            assert found[-1][1] == count
            assert all(start < stop for start, stop in found)
            every = (
                list(itertools.pairwise((0, *cuts, count)))
                for cuts in itertools.combinations(range(1, count), size - 1)
            )
            assert largest(model, found) == min(largest(model, one) for one in every)


def test_large_ends_have_fewer_layers() -> None:
    assert split(ModelBytes(20, (10,) * 8, 20), 4) == [(0, 1), (1, 4), (4, 7), (7, 8)]
    assert layer_settings(split(ModelBytes(0, (1,) * 8, 0), 4)) == ["0:2", "2:4", "4:6", "6:8"]


def test_more_workers_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="a group of 5 workers needs as many layers; the model has 4"):
        split(ModelBytes(1, (1,) * 4, 1), 5)


def test_the_bytes_are_those_of_the_checkpoint(checkpoint: object, tmp_path: object, make_checkpoint: object) -> None:
    region = fill_region(checkpoint)  # type: ignore[arg-type]
    index = region.wait_index()
    found = ModelBytes.of(index)
    assert found.entry + sum(found.layers) + found.exit == index.total_bytes
    assert len(set(found.layers)) == 1
    region.close()
    region = fill_region(make_checkpoint(tmp_path, tie_word_embeddings=True))  # type: ignore[operator]
    tied = ModelBytes.of(region.wait_index())
    assert tied.entry + sum(tied.layers) + tied.exit > region.wait_index().total_bytes
    region.close()
