"""The metadata of a GGUF file, with the values of the expected types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CorruptError, json_kind, short_repr
from .packed_strings import PackedStrings

_NO_TOKEN = (-1, 0xFFFFFFFF)  # converters write these for a special token that a model does not have


class Metadata:
    """A file's values by key, None for a key that it does not have. Methods raise CorruptError with the file's name."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name, self._values = name, values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def error(self, key: str, expected: str, found: str) -> CorruptError:
        beside = ", or put its tokenizer.json beside the file" if key.startswith("tokenizer.") else ""
        return CorruptError(
            f"{self.name}: expected {key} to be {expected}, found {found}; convert the model again{beside}"
        )

    @property
    def architecture(self) -> str:
        """The model's architecture, as llama.cpp names it. Most keys of its sizes begin with it."""
        found = self.text("general.architecture")
        if found is None:
            raise self.error("general.architecture", "a name", "nothing")
        return found

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive number of the architecture's, or a list's if it has the same for all layers."""
        key = f"{self.architecture}.{key}"
        value = self._values.get(key, default)
        if isinstance(value, list) and value:
            if value.count(value[0]) != len(value):
                raise self.error(key, "the same number for each layer", short_repr(value))
            value = value[0]
        if type(value) is not int or value < 1:
            raise self.error(key, "a positive number", "nothing" if value is None else short_repr(value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture's."""
        key = f"{self.architecture}.{key}"
        value = self._values.get(key, default)
        if type(value) not in (int, float):
            raise self.error(key, "a number", "nothing" if value is None else short_repr(value))
        return float(value)

    def has(self, key: str) -> bool:
        """Return whether a key of the architecture has a value other than 0, false or nothing."""
        return bool(self._values.get(f"{self.architecture}.{key}"))

    def flags(self, key: str) -> list[bool] | None:
        """Return a list of the architecture's; None if it is absent or no list."""
        key = f"{self.architecture}.{key}"
        return self._items(key, "booleans", bool) if isinstance(self._values.get(key), list) else None

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string", _kind(value))
        return value

    def flag(self, key: str) -> bool | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false", _kind(value))
        return value

    def token_id(self, key: str, tokens: int) -> int | None:
        """Return the id of a special token, of so many ``tokens``, or None if the model has none."""
        value = self._values.get(key)
        if value is None or (type(value) is int and value in _NO_TOKEN):
            return None
        if type(value) is not int or not 0 <= value < tokens:
            raise self.error(key, f"the id of one of {tokens} tokens", _shown(value))
        return value

    def strings(self, key: str) -> list[str] | None:
        if (packed := self.packed(key)) is not None:
            return packed.strings
        found: list[str] | None = self._items(key, "strings", str)
        return found

    def packed(self, key: str) -> PackedStrings | None:
        """Return strings as they are in the header; None if they are not packed, or there are none."""
        value = self._values.get(key)
        return value if isinstance(value, PackedStrings) else None

    def numbers(self, key: str, count: int | None, *kinds: type) -> list[Any] | None:
        """Return an array of ``count`` numbers, one for each token, or of any length if this is None."""
        values: list[Any] | None = self._items(key, "numbers", *kinds)
        if values is not None and count is not None and len(values) != count:
            raise self.error(key, f"{count} numbers, one for each token", str(len(values)))
        return values

    def _items(self, key: str, what: str, *kinds: type) -> Any:
        values = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, (list, PackedStrings)):
            raise self.error(key, "an array", _kind(values))
        if others := set(map(type, values)).difference(kinds):
            at, value = next((at, value) for at, value in enumerate(values) if type(value) in others)
            raise self.error(key, f"an array of {what}", f"{_shown(value)} at index {at}")
        return values


def _shown(value: Any) -> str:
    return str(value) if type(value) in (int, float) else _kind(value)


def _kind(value: Any) -> str:
    return json_kind([] if isinstance(value, PackedStrings) else value)
