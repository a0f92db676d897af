"""The limits of one rendering of a template, and the account of what it has used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace

CPU_S = 3.0  # and more if the messages are long: some templates look at all earlier ones for each
_MOST_CPU_S = 30.0
_CHARACTERS_S = 25_000  # of messages and tools for a second more
MEMORY_BYTES = 256 << 20  # by which the process may grow meanwhile
ITEM = 16  # characters that an item of a list counts for
LOOK_SIZE = 1 << 24  # characters that are made between two looks at the memory
MOST_BITS = 1 << 14  # as text, fewer digits than Python's own limit
_MOST = 1 << 23  # characters of a text, and four times as many in all; more if the messages are longer
_MOST_DEPTH = 200
_LOOK_S = 0.1
_VIEWS: tuple[type, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_ATOMS = frozenset({str, int, float, bool, type(None), Undefined})


class TemplateLimitError(TemplateError):
    """A chat template exceeds a limit. ``what`` continues the sentence that begins with its name."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the chat template {what}")
        self.what = what


class _TooLargeError(Exception):
    pass


def _size(value: Any, most: float, depth: int = 0) -> int:
    """Return the characters that ``value`` has as text, about. Raises _TooLargeError above ``most``."""
    children: Any
    if isinstance(value, dict):
        children = [*value, *value.values()]
    elif isinstance(value, _VIEWS):
        children = value
    elif isinstance(value, str):
        return len(value)
    elif type(value) is Namespace:
        children = object.__getattribute__(value, "__dict__").values()
    else:
        return ITEM
    if depth == _MOST_DEPTH:
        raise _TooLargeError
    size = ITEM * (len(children) + 1)
    for child in children:
        kind = type(child)
        if kind is str:
            size += len(child)
        elif kind not in _ATOMS:
            size += _size(child, most - size, depth + 1)
        if size > most:
            raise _TooLargeError
    return size


class LimitedContext(Context):
    """The variables of one rendering, and what it has used up. The compiled template calls ``step`` and ``joined``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begun_cpu_s, self._looked_s = time.thread_time(), time.monotonic()
        self._most, self._is_extended = _MOST, False
        self._written = self._made = 0
        self._look_at = LOOK_SIZE
        self._memory_bytes: int | None = None

    def step(self, characters: int = 0) -> None:
        """Note a round of a loop, or a call, that writes so many characters of the template itself."""
        self._written += characters
        if self._written > 4 * self._most:
            self._extend_or_refuse(self._written / 4)
        now = time.monotonic()
        if now - self._looked_s > _LOOK_S:
            self._looked_s = now
            self._look_at_time(time.thread_time() - self._begun_cpu_s)
            self._look_at_memory()

    def joined(self, join: Callable[[Iterable[Any]], str], values: tuple[Any, ...]) -> Any:
        for value in values:
            self.followed(value)
        return self.made(join(values))

    def followed(self, value: Any) -> Any:
        """Return ``value``, all of whose items an operation is going to look at."""
        if type(value) not in _ATOMS:
            self.size(value)
        return value

    def size(self, value: Any) -> int:
        """Return the characters that ``value`` has as text, about. Raises TemplateLimitError for too many."""
        self.step()
        while True:
            try:
                return _size(value, self._most)
            except _TooLargeError:
                self._extend_or_refuse(self._most + 1)

    def check(self, size: float) -> None:
        """Raise TemplateLimitError for a text of so many characters."""
        if size > self._most:
            self._extend_or_refuse(size)

    def made(self, value: Any) -> Any:
        """Return ``value``, which an operation has just made."""
        if isinstance(value, str):
            size = len(value)
        elif isinstance(value, list | tuple | dict):
            size = len(value) * ITEM
        else:
            if type(value) is int and value.bit_length() > MOST_BITS:
                raise TemplateLimitError(f"computes with a number of more than {MOST_BITS} bits")
            return value
        if size > self._most:
            self._extend_or_refuse(size)
        self._made += size
        if self._made > self._look_at:
            self._look_at_memory()
        return value

    def write(self, value: Any) -> Any:
        """Return ``value``, which becomes a part of the text."""
        size = len(value) if isinstance(value, str) else ITEM if type(value) in _ATOMS else self.size(value)
        self._written += size
        if self._written > 4 * self._most:
            self._extend_or_refuse(self._written / 4)
        return value

    def _extend_or_refuse(self, size: float) -> None:
        """Raise TemplateLimitError, unless messages and tools are so long that a text of ``size`` may be right."""
        if not self._is_extended:
            self._is_extended = True
            self._most += 4 * self._given_size
        if size > self._most:
            self.refuse_size()

    @cached_property
    def _given_size(self) -> int:
        """The characters of the messages, the tools and whatever else the template is given."""
        given = [value for name, value in self.parent.items() if name not in self.environment.globals]
        try:
            return _size(given, 1 << 40)
        except _TooLargeError:
            raise TemplateLimitError("is given lists in lists, or objects, too deep to count") from None

    def refuse_size(self) -> NoReturn:
        raise TemplateLimitError(f"makes texts or lists of more than {self._most} characters from these messages")

    def _look_at_time(self, taken_s: float) -> None:
        if taken_s > CPU_S and taken_s > (most_s := min(CPU_S + self._given_size / _CHARACTERS_S, _MOST_CPU_S)):
            raise TemplateLimitError(f"took more than {most_s:.3g} s of CPU time")

    def _look_at_memory(self) -> None:
        from ..limits import private_bytes

        self._look_at = self._made + LOOK_SIZE
        found = private_bytes()
        if self._memory_bytes is None:
            self._memory_bytes = found
        if found > self._memory_bytes + MEMORY_BYTES + 16 * (self._most - _MOST):
            raise TemplateLimitError(f"took more than {MEMORY_BYTES >> 20} MB of memory")
