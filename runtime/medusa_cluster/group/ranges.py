"""The ranges of layers for the workers of a group, with the bytes shared as evenly as contiguous ranges allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.checkpoint.order import layer_numbers, layers_first
from medusa_runtime.errors import ConfigError


class ModelBytes(NamedTuple):
    """The bytes of a model's parts: everything before the layers, each layer, and everything after them."""

    entry: int
    layers: tuple[int, ...]
    exit: int

    @classmethod
    def of(cls, index: WeightIndex) -> ModelBytes:
        """Return the bytes by a checkpoint's index. Tied embeddings count at both ends, as both workers need them.

        Raises ConfigError for a model without layers.
        """

        def size(names: Iterable[str]) -> int:
            return sum(index.tensors[name].stop - index.tensors[name].start for name in names)

        numbers = layer_numbers(index.order)
        count = max(numbers.values(), default=-1) + 1
        if not count:
            raise ConfigError("expected a model of layers to share among workers, found none in its tensors' names")
        layers = tuple(size(name for name in numbers if numbers[name] == number) for number in range(count))
        own = [size(layers_first(index.order, number, number + 1)[0]) for number in (0, count - 1)]
        if count == 1:
            return cls(0, (own[0],), 0)
        return cls(own[0] - layers[0], layers, own[1] - layers[-1])


def split(model: ModelBytes, size: int) -> list[tuple[int, int]]:
    """Return the layers [start, stop) of each of ``size`` workers, in order.

    The largest part has as few bytes as possible, because the slowest worker decides when the first token comes. Among
    equally good splits, the earlier workers get fewer bytes. Raises ConfigError if there are fewer layers than workers.
    """
    count = len(model.layers)
    if not 1 <= size <= count:
        raise ConfigError(f"a group of {size} workers needs as many layers; the model has {count}")
    return _Split(model, size).ranges()


class _Split:
    """The search for contiguous ranges with the smallest maximum, by bisection over all possible maxima."""

    def __init__(self, model: ModelBytes, size: int) -> None:
        self._model = model
        self._size = size
        self._sums = [0]
        for layer in model.layers:
            self._sums.append(self._sums[-1] + layer)

    def bytes_of(self, start: int, stop: int) -> int:
        ends = (self._model.entry if start == 0 else 0) + (self._model.exit if stop == len(self._model.layers) else 0)
        return self._sums[stop] - self._sums[start] + ends

    def ranges(self) -> list[tuple[int, int]]:
        count = len(self._model.layers)
        sizes = sorted({self.bytes_of(a, b) for a in range(count) for b in range(a + 1, count + 1)})
        low, high = 0, len(sizes) - 1
        while low < high:
            middle = (low + high) // 2
            if self._within(sizes[middle]) is None:
                low = middle + 1
            else:
                high = middle
        found = self._within(sizes[low])
        assert found is not None
        return found

    def _within(self, most: int) -> list[tuple[int, int]] | None:
        """Return ranges of at most ``most`` bytes each, or None if there are none.

        Going from the end, each worker takes as much as it may, but leaves a layer for each worker before it.
        """
        found: list[tuple[int, int]] = []
        stop = len(self._model.layers)
        for left in range(self._size - 1, -1, -1):
            start = stop - 1
            if start < left or self.bytes_of(start, stop) > most:
                return None
            while start > left and self.bytes_of(start - 1, stop) <= most:
                start -= 1
            if left == 0 and start > 0:
                return None
            found.append((start, stop))
            stop = start
        return found[::-1]


def layer_settings(ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Return the value of ``--layers`` for each worker."""
    return [f"{start}:{stop}" for start, stop in ranges]


__all__ = ["ModelBytes", "layer_settings", "split"]
