"""A record of the graphs that offline processes begin to try out, which shows in which of them a process has ended.

A replay that breaks the CUDA context ends its process, and one that hangs is ended with it. So another process starts
from the beginning, and leaves out the graphs in which earlier ones have ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...state.graphs.blueprint import Blueprints
from ...state.graphs.mismatch import GraphMismatch, Reason

CHECK, UNPIN = "check", "unpin"


class Attempts:
    """The record, in ``file``. Processes write it one after the other."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @contextmanager
    def trying(self, work: str, *keys: str) -> Iterator[None]:
        """A context in which these graphs are tried out. If an error leaves it, they have ended the process."""
        self.begin(work, *keys)
        yield
        self.succeed()

    def begin(self, work: str, *keys: str) -> None:
        """Record that this work begins with these graphs. Unless ``succeed`` follows, they have ended the process."""
        self._write([work, *keys])

    def succeed(self) -> None:
        """Record that what was begun last has not ended the process."""
        self._write([])

    def unfinished(self) -> list[list[str]]:
        """Return what has ended a process: the work and the keys of its graphs, in order."""
        entries = [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []
        following = [*entries[1:], ["the end"]]
        return [entry for entry, after in zip(entries, following, strict=False) if entry and after]

    def ended(self, work: str) -> set[str]:
        """Return the keys of the graphs with which this work has ended a process."""
        return {key for done, *keys in self.unfinished() for key in keys if done == work}

    def without_ended(self, blueprints: Blueprints) -> Blueprints:
        """Return the blueprints without the graphs whose check has ended a process."""
        why = GraphMismatch(Reason.OUTPUT, "the process that checked it broke its CUDA context, or did not end")
        return blueprints.without(dict.fromkeys(sorted(self.ended(CHECK)), str(why)))

    def _write(self, entry: list[str]) -> None:
        with self._file.open("a") as file:
            file.write(f"{json.dumps(entry)}\n")


__all__ = ["CHECK", "UNPIN", "Attempts"]
