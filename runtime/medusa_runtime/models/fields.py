"""Reading a config.json. A value of the wrong type raises an error that names its key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import ConfigError, CorruptError, short_repr

if TYPE_CHECKING:
    from medusa_runtime.load.quantized.scheme import Quantization

QUANTIZED = ("quantization_config", "compression_config")  # the keys that may describe a quantization
ReadFile = Callable[[str], bytes | None]
_MISSING = object()
_MOST = (1 << 31) - 1  # the largest count, such as a number of layers or a vocabulary's size
_MOST_NUMBER = 1e30
_MOST_SHOWN = 100  # characters of a wrong value


def read_json(read: ReadFile, name: str) -> Any:
    """Read a small JSON file of a checkpoint; None if it is absent. Raises CorruptError if it is not JSON."""
    data = read(name)
    return None if data is None else _parsed(name, data)


def read_object(read: ReadFile, name: str) -> dict[str, Any] | None:
    """Read a JSON object from a small file; None if it is absent. Raises CorruptError if it is something else."""
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
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CorruptError(f"{name}: expected JSON, found something else at {where}") from None
    except ValueError as error:
        raise CorruptError(f"{name}: expected JSON, found: {error}") from None


class Fields:
    """The keys of one JSON object, read with checks of their types.

    A method that takes several names reads the first that is present. A key that is null counts as absent, as it does
    for transformers. ``where`` names the object in errors. Each method raises ConfigError for a wrong value, and for an
    absent one without a default.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where

    def get(self, *names: str) -> Any:
        """Return the value of the first of these keys that is present, or None. It can have any type."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), None)

    def count(self, *names: str, default: int | None = None, most: int = _MOST) -> int:
        """Read a positive integer of at most ``most``."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(names[0], "a positive integer", value)
        if value > most:
            raise self.error(names[0], f"at most {most}", value)
        return value

    def index(self, *names: str, default: int) -> int:
        """Read an integer of 0 or more."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(names[0], "an integer of 0 or more", value)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Read a finite number of 0 or more."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_NUMBER:
            raise self.error(names[0], "a number of 0 or more", value)
        return float(value)

    def positive(self, *names: str, default: float | None = None) -> float:
        """Read a finite number above 0."""
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
        """Read a list of names; None if it is absent."""
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise self.error(name, "a list of names", value)
        found: list[str] | None = value
        return found

    def ids(self, name: str) -> tuple[int, ...]:
        """Read token ids, as ``token_ids`` does. The tuple is empty if the key is absent."""
        found = token_ids(self.get(name))
        if found is None:
            raise self.error(name, "a token id or a list of them", self.get(name))
        return found

    def quantization(self) -> Quantization | None:
        """Read how the weights are quantized, or None. Raises ModelError for a format that is not supported."""
        if self.get(*QUANTIZED) is None:
            return None
        from medusa_runtime.load.quantized.scheme import Quantization  # most checkpoints do not need it

        return Quantization.of(self.raw, self.where)

    def error(self, name: str, expected: str, found: Any) -> ConfigError:
        """Return the error for a key whose value is not what was expected."""
        text = "nothing" if found is _MISSING else short_repr(found, _MOST_SHOWN)
        return ConfigError(f"{self.where}: expected {name} to be {expected}, found {text}")

    def _value(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is not None:
            return value
        return _MISSING if default is None else default


def token_ids(value: Any) -> tuple[int, ...] | None:
    """Return a token id, or a list of them, as a tuple; None if the value is something else.

    Negative ids are left out: some files have -1 for "none". The value None has no ids.
    """
    found = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(type(token) is int for token in found):
        return None
    return tuple(token for token in found if token >= 0)
