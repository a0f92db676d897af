"""Reads one call, ``{"name": …, "arguments": {…}}``, as its characters come."""

from __future__ import annotations

import json

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class ValueScanner:
    """A scanner that finds the end of one JSON value, where it is ``done``. ``text`` is the value so far.

    Here and below, characters are kept in lists: adding each to a text would copy the text, and models write megabytes.
    """

    def __init__(self) -> None:
        self._characters: list[str] = []
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def text(self) -> str:
        return "".join(self._characters)

    @property
    def is_container(self) -> bool:
        return self._characters[:1] in (["{"], ["["])

    def feed(self, character: str) -> bool:
        """Take a character. Return False if it is already behind the value."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            self.done = not self._in_string and not self._depth
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.done = not self._depth
        elif not self._depth and (character in ",}]" or character in _SPACE):
            self.done = True
            return False
        self._characters.append(character)
        return True


class CallScanner:
    """A scanner of one call. Once ``name`` is known, ``take`` returns the argument text since it was last called."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self.name: str | None = None
        self.done = False
        self.failed = False
        self._key: str | None = None
        self._value: ValueScanner | None = None
        self._expects = "{"
        self._fresh: list[str] = []
        self._has_arguments = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def feed(self, character: str) -> None:
        """Take a character. Set ``failed`` if no call can have it there, and ``done`` at the closing brace."""
        self._raw.append(character)
        if self._value is not None:
            value = self._value
            taken = value.feed(character)
            if taken and self._key in _ARGUMENTS and value.is_container:
                self._fresh.append(character)
            if value.done:
                self._end(value)
            if taken:
                return
        if character not in _SPACE:
            self._structure(character)

    def take(self) -> str:
        if self.name is None:
            return ""
        fresh, self._fresh = self._fresh, []
        return "".join(fresh)

    def _structure(self, character: str) -> None:
        """Take a character between keys and values."""
        if self._expects != "value" and character not in self._expects:
            self.failed = True
            return
        if self._expects == "value":
            self._begin(character)
        elif character == "{":
            self._expects = '"}'
        elif character == '"':
            self._key = None
            self._begin(character)
        elif character == ":":
            self._expects = "value"
        elif character == ",":
            self._expects = '"'
        else:  # the closing brace
            self.done = True
            self.failed = self.name is None
            if not self._has_arguments:
                self._fresh = ["{}"]

    def _begin(self, character: str) -> None:
        self._value = ValueScanner()
        self._value.feed(character)
        if self._key in _ARGUMENTS:
            self._has_arguments = True
            if self._value.is_container:
                self._fresh.append(character)

    def _end(self, value: ValueScanner) -> None:
        """Take a complete key or value."""
        self._value = None
        try:
            found = json.loads(value.text) if not value.is_container else None
        except ValueError:
            self.failed = True
            return
        if self._expects != "value":
            self._key = str(found)
            self._expects = ":"
            return
        if self._key == "name":
            self.name = found if isinstance(found, str) else None
            self.failed = self.name is None
        elif self._key in _ARGUMENTS and not value.is_container:
            # Some models write the object into a string.
            self._fresh.append(found if isinstance(found, str) and found else "{}")
        self._key = None
        self._expects = ",}"
