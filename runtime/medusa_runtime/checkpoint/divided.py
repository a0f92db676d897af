"""A weight index in which parts of some tensors have names of their own, as if they were tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .index import TensorEntry, WeightIndex

Divide = Callable[[str, TensorEntry], Mapping[str, TensorEntry] | None]


class DividedIndex(WeightIndex):
    """The index of a checkpoint with the parts of tensors that ``divide`` returns in place of the whole ones.

    ``divide`` gets each tensor, and returns None for those that stay whole. ``parts`` has all parts by their names.
    """

    def __init__(self, index: WeightIndex, divide: Divide) -> None:
        self.parts: dict[str, TensorEntry] = {}
        self._wholes: dict[str, str] = {}
        tensors: dict[str, TensorEntry] = {}
        for name in index.order:
            parts = divide(name, index.tensors[name])
            if parts is None:
                tensors[name] = index.tensors[name]
                continue
            self.parts.update(parts)
            self._wholes.update(dict.fromkeys(parts, name))
            tensors.update(parts)
        super().__init__(index.shards, tensors, tuple(tensors), recorded=index.recorded)

    def stored_names(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self._wholes.get(name, name) for name in names))


def rows(entry: TensorEntry, names: Iterable[str]) -> dict[str, TensorEntry]:
    """Return the parts of a contiguous tensor along its first dimension, without that dimension, by these names."""
    count = entry.shape[0]
    size = (entry.stop - entry.start) // count
    return {
        name: entry._replace(start=entry.start + at * size, stop=entry.start + (at + 1) * size, shape=entry.shape[1:])
        for at, name in enumerate(names)
    }


__all__ = ["Divide", "DividedIndex", "rows"]
