"""A region whose quantized weights appear as floats, under the names that they would have unquantized."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from medusa_runtime.checkpoint.divided import Divide
from medusa_runtime.checkpoint.index import TensorEntry, WeightIndex
from medusa_runtime.errors import MismatchError
from medusa_runtime.load.quantized.layouts import LAYOUTS, QuantizedWeight, find_quantized, is_unused
from medusa_runtime.load.quantized.scheme import Quantization
from medusa_runtime.load.region_tensors import RegionTensors
from medusa_runtime.load.views import DTYPES
from medusa_runtime.region.file_range import FileRange
from medusa_runtime.region.reader import Region


class DequantizedIndex(WeightIndex):
    """The index of a checkpoint as if it were not quantized.

    ``stored`` has the quantized weights, by their names in this index.
    """

    def __init__(self, index: WeightIndex, quantization: Quantization, dtype: torch.dtype) -> None:
        """List quantized weights with dtype ``dtype``. Raises MismatchError if parts are missing or do not fit."""
        self.stored: dict[str, QuantizedWeight] = find_quantized(quantization.scheme, index.tensors)
        whole = {part: name for name, stored in self.stored.items() for part in stored.parts.values()}
        named = next(name for name, found in DTYPES.items() if found is dtype)
        order: dict[str, None] = {}
        tensors: dict[str, TensorEntry] = {}
        for name in index.order:
            entry = index.tensors[name]
            if name in whole:
                name = whole[name]
                entry = entry._replace(dtype=named, shape=self.stored[name].shape, strides=None)
            elif is_unused(name):
                continue
            tensors.setdefault(name, entry)
            order[name] = None
        self._stored_index, self._quantization = index, quantization
        super().__init__(index.shards, tensors, tuple(order), recorded=index.recorded)

    def stored_names(self, names: Iterable[str]) -> list[str]:
        return self._stored_index.stored_names(self.parts(names))

    def made_bytes(self, name: str, dtype: torch.dtype, *, keep_codes: bool) -> int:
        """Return how many bytes a quantized weight takes beside the region; see ``Codes.kept`` for ``keep_codes``."""
        stored = self.stored[name]
        if keep_codes and stored.can_stay and self._quantization.is_changed(name):
            entry = self._stored_index.tensors[name]
            return entry.stop - entry.start
        values, layout = math.prod(stored.shape), LAYOUTS[stored.scheme.layout]
        if not keep_codes or not stored.can_stay:
            return values * dtype.itemsize
        groups = values // (stored.scheme.group or stored.shape[1])
        if layout.is_transposed:  # all is copied, with a scale and a zero point of 16 bits each
            return values * stored.scheme.bits // 8 + 2 * 2 * groups
        return 2 * groups if "weight_zero_point" in stored.parts else 0

    def parts(self, names: Iterable[str]) -> list[str]:
        """Return the checkpoint's names of the tensors that make up these, in the same order."""
        stored = self.stored
        return list(chain.from_iterable(stored[name].parts.values() if name in stored else (name,) for name in names))


class DequantizedTensors(RegionTensors):
    """The tensors of a quantized region. A weight is dequantized to ``dtype`` once all its parts have arrived.

    Where its codes are kept, it stays quantized: it is a view of the region, or a copy in an order that the kernels
    can read.
    """

    def __init__(
        self, region: Region, quantization: Quantization, dtype: torch.dtype, divide: Divide | None = None
    ) -> None:
        super().__init__(region, divide)
        self._quantization, self._dtype = quantization, dtype
        self._index: DequantizedIndex | None = None
        self._viewed: set[str] = set()  # the quantized weights that are views of the region

    def wait_index(self, timeout_s: float | None = None) -> DequantizedIndex:
        if self._index is None:
            self._index = DequantizedIndex(self._stored_index(timeout_s), self._quantization, self._dtype)
        return self._index

    def has(self, name: str) -> bool:
        return all(self.region.has(part) for part in self._parts(name))

    def wait_tensor(self, name: str, timeout_s: float | None = None) -> None:
        for part in self._parts(name):
            self.region.wait_tensor(part, timeout_s)

    def demand(self, names: Sequence[str]) -> None:
        self.region.demand(self.wait_index().parts(names))

    def hint(self, names: Sequence[str]) -> None:
        self.region.hint(self.wait_index().parts(names))

    def tensor(self, name: str, *, keep_codes: bool = False) -> Tensor:
        stored = self.wait_index().stored.get(name)
        if stored is None:
            return self._restored(name)
        codes = stored.codes({part: self._restored(full) for part, full in stored.parts.items()})
        kept = codes.kept(self._dtype) if keep_codes else None
        if kept is None:
            return codes.dequantize(self._dtype)
        if not codes.transposed and not self._quantization.is_changed(name):
            self._viewed.add(name)
        return kept

    def _restored(self, name: str) -> Tensor:
        """Return a stored tensor as the checkpoint had it from which a GGUF file was made."""
        tensor = super().tensor(name)
        if (heads := self._quantization.paired_heads(name)) is not None:
            if tensor.shape[0] % (2 * heads):
                raise MismatchError(f"{name}: expected rows of {heads} heads of even size, found {list(tensor.shape)}")
            pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
            return pairs.transpose(1, 2).reshape(tensor.shape)
        shift = self._quantization.shift(name)
        return tensor - shift if shift else tensor

    def file_range(self, name: str) -> FileRange | None:
        return None if self._is_made(name) else super().file_range(name)

    def applied(self, name: str, *, copied: bool, release: bool) -> None:
        made = self._is_made(name) and name not in self._viewed
        for part in self._parts(name):
            super().applied(part, copied=copied or made, release=release)

    def release_unread(self, names: Collection[str]) -> None:
        super().release_unread(self.wait_index().parts(names))

    def _is_made(self, name: str) -> bool:
        return name in self.wait_index().stored or self._quantization.is_changed(name)

    def _parts(self, name: str) -> Sequence[str]:
        return self.wait_index().parts((name,))


__all__ = ["DequantizedIndex", "DequantizedTensors"]
