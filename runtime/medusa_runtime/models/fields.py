"""Reading a config.json: each value has the right type, or one error names its key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    from medusa_runtime.load.quantized.scheme import Quantization

QUANTIZED = ("quantization_config", "compression_config")  # the key is one of these
ReadFile = Callable[[str], bytes | None]
_MISSING = object()
_MOST = (1 << 31) - 1  # of what a model counts
_MOST_NUMBER = 1e30
_MOST_SHOWN = 100  # characters of a wrong value


def read_json(read: ReadFile, name: str) -> Any:
    """The JSON value in a small file of a checkpoint; None without the file. Raises CorruptError for other text."""
    data = read(name)
    return None if data is None else _parsed(name, data)


def read_object(read: ReadFile, name: str) -> dict[str, Any] | None:
    """The JSON object in a small file; None without the file. Raises CorruptError when it is something else."""
    data = read(name)
    if data is None:
        return None
    parsed = _parsed(name, data)
    if not isinstance(parsed, dict):
        raise CorruptError(f"{name}: expected a JSON object, found {type(parsed).__name__}")
    return parsed


def _parsed(name: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise CorruptError(f"{name}: expected JSON, found too many levels of it") from None
    except ValueError as error:
        raise CorruptError(f"{name}: expected JSON, found: {error}") from None


class Fields:
    """The keys of one JSON object. A key that is null counts as absent, as it does for transformers."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where

    def get(self, *names: str) -> Any:
        """The value of the first of these keys that is present, or None."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), None)

    def count(self, *names: str, default: int | None = None, most: int = _MOST) -> int:
        """A positive integer. Raises ConfigError if it is absent and has no default, or is something else."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(names[0], "a positive integer", value)
        if value > most:
            raise self.error(names[0], f"at most {most}", value)
        return value

    def index(self, *names: str, default: int) -> int:
        """An integer of 0 or more."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(names[0], "an integer of 0 or more", value)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number of 0 or more."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_NUMBER:
            raise self.error(names[0], "a number of 0 or more", value)
        return float(value)

    def positive(self, *names: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(*names, default=default)
        if not value:
            raise self.error(names[0], "a number above 0", self._value(names, default))
        return value

    def flag(self, *names: str, default: bool) -> bool:
        value = self._value(names, default)
        if not isinstance(value, bool):
            raise self.error(names[0], "true or false", value)
        return value

    def choice(self, name: str, known: Mapping[str, Any], *, default: str) -> str:
        value = self._value((name,), default)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, f"one of {', '.join(known)}", value)
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of names; None if it is absent."""
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise self.error(name, "a list of names", value)
        found: list[str] | None = value
        return found

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id, several, or none."""
        value = self.get(name)
        found = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if not all(isinstance(item, int) for item in found):
            raise self.error(name, "a token id or a list of them", value)
        return found

    def quantization(self) -> Quantization | None:
        """Return how the weights are quantized, if they are. Raises ConfigError for a way that is not supported."""
        if self.get(*QUANTIZED) is None:
            return None
        from medusa_runtime.load.quantized.scheme import Quantization  # most checkpoints do without it

        return Quantization.of(self.raw, self.where)

    def error(self, name: str, expected: str, found: Any) -> ConfigError:
        """The error for a key whose value is not as expected."""
        shown = "nothing" if found is _MISSING else shortened(found)
        return ConfigError(f"{self.where}: expected {name} to be {expected}, found {shown}")

    def _value(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is not None:
            return value
        return _MISSING if default is None else default


def shortened(value: Any) -> str:
    """A value in words for a message: its file may hold megabytes, or a number of too many digits to be written."""
    try:
        text = repr(value[: _MOST_SHOWN + 1] if isinstance(value, str | list) else value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
