"""The metadata of a GGUF file, with the values of the expected types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CorruptError, json_kind

_NO_TOKEN = (-1, 0xFFFFFFFF)  # converters write these for a special token that a model does not have


class Metadata:
    """A file's values by key, None for a key that it does not have. Methods raise CorruptError with the file's name."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name, self._values = name, values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def error(self, key: str, expected: str, found: str) -> CorruptError:
        return CorruptError(
            f"{self.name}: expected {key} to be {expected}, found {found}; "
            "convert the model again, or put its tokenizer.json beside the file"
        )

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string", json_kind(value))
        return value

    def flag(self, key: str) -> bool | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false", json_kind(value))
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
        return self._items(key, "strings", str)

    def numbers(self, key: str, count: int | None, *kinds: type) -> list[Any] | None:
        """Return an array of ``count`` numbers, one for each token, or of any length if this is None."""
        values = self._items(key, "numbers", *kinds)
        if values is not None and count is not None and len(values) != count:
            raise self.error(key, f"{count} numbers, one for each token", str(len(values)))
        return values

    def _items(self, key: str, what: str, *kinds: type) -> list[Any] | None:
        values = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, list):
            raise self.error(key, "an array", json_kind(values))
        if others := set(map(type, values)).difference(kinds):
            at, value = next((at, value) for at, value in enumerate(values) if type(value) in others)
            raise self.error(key, f"an array of {what}", f"{_shown(value)} at index {at}")
        return values


def _shown(value: Any) -> str:
    return str(value) if type(value) in (int, float) else json_kind(value)
