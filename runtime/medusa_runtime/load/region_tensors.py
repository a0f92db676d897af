"""What a loader reads: the tensors of a region, by the names under which a module expects them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from medusa_runtime.checkpoint.divided import Divide, DividedIndex
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.load.views import Views
from medusa_runtime.region.file_range import FileRange
from medusa_runtime.region.reader import Region


class RegionTensors:
    """The tensors of a region. ``DequantizedTensors`` makes one weight of several stored tensors.

    With ``divide``, parts of a tensor take its place (``DividedIndex``). Each is then waited for and fetched by itself.
    """

    def __init__(self, region: Region, divide: Divide | None = None) -> None:
        self.region = region
        self._divide = divide
        self._divided: WeightIndex | None = None
        self._views: Views | None = None

    def wait_index(self, timeout_s: float | None = None) -> WeightIndex:
        """Wait for the index of these tensors and return it, like ``Region.wait_index``."""
        return self._stored_index(timeout_s)

    def _stored_index(self, timeout_s: float | None = None) -> WeightIndex:
        if self._divide is None:
            return self.region.wait_index(timeout_s)
        if self._divided is None:
            found = DividedIndex(self.region.wait_index(timeout_s), self._divide)
            self.region.name_parts(found)
            self._divided = found
        return self._divided

    def has(self, name: str) -> bool:
        """Return whether all bytes of a tensor are there, without waiting."""
        return self.region.has(name)

    def wait_tensor(self, name: str, timeout_s: float | None = None) -> None:
        """Wait for all bytes of a tensor, like ``Region.wait_tensor``."""
        self.region.wait_tensor(name, timeout_s)

    @property
    def fetched_bytes(self) -> int:
        """The number of bytes fetched so far, as ``wait_for_more`` takes it."""
        return self.region.fetched_bytes

    def wait_for_more(self, fetched_bytes: int, timeout_s: float) -> None:
        """Sleep until more than ``fetched_bytes`` bytes are there, like ``Region.wait_for_more``."""
        self.region.wait_for_more(fetched_bytes, timeout_s)

    def demand(self, names: Sequence[str]) -> None:
        """Have these tensors fetched before all others; does not wait."""
        self.region.demand(names)

    def hint(self, names: Sequence[str]) -> None:
        """Have these tensors fetched next; does not wait."""
        self.region.hint(names)

    def tensor(self, name: str, *, keep_codes: bool = False) -> Tensor:
        """Return a tensor whose bytes have arrived: a view of the region where that is possible.

        With ``keep_codes`` a quantized weight may stay as it is stored: it is a ``QuantizedParameter``.
        """
        if self._views is None:
            self._views = Views(self.region)
        return self._views.tensor(name, self._stored_index().tensors[name])

    def file_range(self, name: str) -> FileRange | None:
        """Return where a tensor's bytes are in a file; None if it is made of others."""
        return self.region.file_range(name)

    def applied(self, name: str, *, copied: bool, release: bool) -> None:
        """Note that a module has a tensor. If it was ``copied``, unmap it from this process.

        With ``release``, also drop a copied tensor's bytes from the region.
        """
        if not copied:
            self.region.viewed.add(name)
        elif release:
            self.region.release(name)
        else:
            self.region.unmap(name)

    def release_unread(self, names: Collection[str]) -> None:
        """Have tensors' bytes dropped that nobody will read, like ``Region.release_unread``."""
        self.region.release_unread(names)


__all__ = ["RegionTensors"]
