"""A range of a model's layers, and the other modules that belong to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from medusa_runtime.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from medusa_runtime.models.base import DecoderModel


class LayerRange(NamedTuple):
    """The layers [start, stop) of a model with ``total`` layers.

    The embedding belongs to the range with the first layer, and the final norm and the head to the range with the last.
    """

    start: int
    stop: int
    total: int

    @classmethod
    def parse(cls, text: str, count: int) -> LayerRange:
        """Read ``START:STOP``. Raises ConfigError when a model with ``count`` layers has no such range."""
        start, separator, stop = text.partition(":")
        if not (separator and start.isascii() and stop.isascii() and start.isdigit() and stop.isdigit()):
            raise ConfigError(f"layers={text!r} cannot be used: expected START:STOP, such as 0:8")
        if not 0 <= int(start) < int(stop) <= count:
            raise ConfigError(f"layers={text!r} cannot be used: expected a range within 0:{count}, the model's layers")
        return cls(int(start), int(stop), count)

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.total

    def needs(self, model: DecoderModel, name: str) -> bool:
        """Return whether this range needs the module or parameter with this qualified name."""
        unit, _, rest = name.partition(".")
        if unit == "layers":
            number = rest.partition(".")[0]
            return number.isdigit() and self.start <= int(number) < self.stop
        return self.is_first if unit in model.embedding_modules else self.is_last and bool(unit)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


def require_ranges(model: DecoderModel) -> None:
    """Raise ModelError for a family whose layers cannot be given to several workers."""
    if not model.embedding_modules:
        raise ModelError(
            f"{model.config.architecture} cannot be split over several workers: its layers do not run in ranges here; "
            "expected one worker for it"
        )


__all__ = ["LayerRange", "require_ranges"]
