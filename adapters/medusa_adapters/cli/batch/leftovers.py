"""Results that a batch has left beside its output, because it was killed or could not replace the output."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from medusa_runtime.errors import ConfigError
from medusa_runtime.storage.base import redacted

from .lines import NoteId, whole_lines

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_MOST_NAMED = 3  # objects in a message


def new_suffix() -> str:
    """Return what a batch adds to its output's name for the object that its results go to first."""
    return f".{os.urandom(6).hex()}.new"


class Range(NamedTuple):
    """Whole lines of an object of results."""

    path: str
    start: int
    stop: int


def pieces(system: Any, ranges: Iterable[Range]) -> Iterator[bytes]:
    """Yield the bytes of these ranges in the file system ``system``. Raises EOFError if they are no longer there."""
    for path, start, stop in ranges:
        with system.open(path, "rb") as file:
            file.seek(start)
            while start < stop:
                piece = file.read(min(_PIECE_BYTES, stop - start))
                if not piece:
                    raise EOFError(f"{path.rpartition('/')[2]} is shorter than it was")
                start += len(piece)
                yield piece


class Leftovers:
    """The results of earlier batches in objects beside an output. No object is removed: a batch may still write to it.

    ``path`` is the output's in the file system ``system``, and ``url`` names it in messages.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:
        self._system = system
        self._path = path
        self._name = redacted(url)
        self.ranges: list[Range] = []  # the lines that the output lacks

    def _suffixes(self) -> list[str]:
        """Return what the names of the objects add to the output's."""
        form = re.compile(re.escape(self._path.rpartition("/")[2]) + r"(\.[0-9a-f]{12}\.new)")
        try:
            listed = self._system.ls(self._system._parent(self._path), detail=False)
        except FileNotFoundError:
            return []
        found = (form.fullmatch(str(path).rpartition("/")[2]) for path in listed)
        return sorted(match[1] for match in found if match)

    def require_none(self) -> None:
        """Raise ConfigError if there are any. Where objects cannot be listed, there are none."""
        found: list[str] = []
        with suppress(Exception):
            found = self._suffixes()
        if found:
            text = f"there are results beside it, in {self._name}{found[0]}, of a batch that was killed, or still runs"
            raise ConfigError(f"{self._name}: {text}; --resume uses them, or remove them, or choose another file")

    def take_up(self, note: NoteId) -> None:
        """Call ``note`` with the key of each result, and keep those that are new. Raises ConfigError and others."""
        try:
            suffixes = self._suffixes()
        except Exception as error:  # noqa: BLE001 each file system has errors of its own
            logger.warning("%s*.new, which killed batches leave, could not be looked for (%s)", self._name, error)
            return
        count, used = 0, []
        for suffix in suffixes:
            path, name, before = self._path + suffix, self._name + suffix, count
            with self._system.open(path, "rb") as file:
                for start, stop, key in whole_lines(file, name):
                    if key is not None and note(key):
                        count += 1
                        self._add(path, start, stop)
            if count > before:
                used.append(name)
        if used:
            more = len(used) - _MOST_NAMED
            names = ", ".join(used[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
            text = "%d results are taken from %s, which other batches have left; when those have ended, remove these"
            logger.warning(text, count, names)

    def _add(self, path: str, start: int, stop: int) -> None:
        if self.ranges and self.ranges[-1].path == path and self.ranges[-1].stop == start:
            start = self.ranges.pop().start
        self.ranges.append(Range(path, start, stop))


__all__ = ["Leftovers", "Range", "new_suffix", "pieces"]
