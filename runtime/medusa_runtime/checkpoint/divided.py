"""A weight index in which parts of some tensors have names of their own, as if they were tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..errors import MismatchError
from .header import MOST_TENSORS, too_many_tensors
from .index import TensorEntry, WeightIndex

Divide = Callable[[str, TensorEntry], Mapping[str, TensorEntry] | None]


class DividedIndex(WeightIndex):
    """The index of a checkpoint with the parts of tensors that ``divide`` returns in place of the whole ones.

    ``divide`` gets each tensor, and returns None for those that stay whole. ``parts`` has all parts by their names.
    Raises MismatchError for a part with the name of another tensor.
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
            if taken := next((one for one in parts if one in index.tensors or one in self.parts), None):
                raise MismatchError(f"{taken}: expected once, found as a part of {name}, too")
            self.parts.update(parts)
            self._wholes.update(dict.fromkeys(parts, name))
            tensors.update(parts)
            if len(tensors) > MOST_TENSORS:  # here, because a few tensors may have any number of parts
                raise too_many_tensors("the checkpoint", len(tensors))
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
