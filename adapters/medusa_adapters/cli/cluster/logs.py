"""`medusa cluster logs`: what the processes of nodes, and instances of models, have logged."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from medusa_runtime.errors import ClusterError, MedusaError, UnknownNameError
from medusa_runtime.logs import for_terminal

from ..progress import note, size
from .connection import add_connection, ask

_INSTANCE = "instance-"
_LOOK_S = 1.0
_LINES = 100
_LONGEST_LINE = 1 << 20  # characters; a longer one is shown in parts
_AT_ONCE = 16  # questions under way, because a node that hangs is waited for

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a model, an instance, a node, or NODE/LOG; default: list the logs"
    )
    parser.add_argument("--lines", type=int, default=_LINES, metavar="N", help="the last N lines of each log")
    parser.add_argument("--follow", action="store_true", help="go on with what is logged, until Ctrl-C")
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    nodes = _Nodes(arguments)
    if arguments.name is None:
        for log in nodes.logs():
            print(for_terminal(f"{log.name}  {size(log.size_bytes)}"))
        return 0
    chosen = _chosen(nodes.logs(), arguments.name)
    if not chosen:
        raise UnknownNameError(
            f"nothing is logged of {arguments.name!r}; expected a model that has had an instance, an instance, a node "
            "or NODE/LOG; without a name, the logs are listed"
        )
    followed = Followed(
        nodes, lines=max(arguments.lines, 0), named=len(chosen) > 1 or arguments.follow, once=not arguments.follow
    )
    followed.show(chosen)
    away = False
    while arguments.follow:
        sys.stdout.flush()
        time.sleep(_LOOK_S)
        try:
            chosen = _chosen(nodes.logs(), arguments.name)
        except ClusterError as error:  # as while the controller starts again
            if not away:
                note(for_terminal(f"waiting: {error}"))
            away = True
            continue
        away = False
        followed.show(chosen)
    return 0


@dataclass(frozen=True, slots=True)
class Log:
    node: str
    log: str
    size_bytes: int

    @property
    def name(self) -> str:
        return f"{self.node}/{self.log}"


class _Nodes:
    """The nodes of the cluster, each of which has the logs of its machine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._silent: set[str] = set()

    def logs(self) -> list[Log]:
        """Return the logs of all nodes that answer, and note once which do not."""
        names = sorted(str(node["name"]) for node in ask(self._arguments, "status", {})["nodes"])
        found: list[Log] = []
        for name, sizes in _ask_each(names, lambda name: ask(self._arguments, "logs", {"node": name})):
            if not isinstance(sizes, MedusaError):
                self._silent.discard(name)
                found += [Log(name, str(log), int(size_bytes)) for log, size_bytes in sizes.items()]
            elif name not in self._silent:
                self._silent.add(name)
                note(for_terminal(f"{name} is left out: {sizes}"))
        return sorted(found, key=lambda log: log.name)

    def read(self, parts: Sequence[tuple[Log, int | None]]) -> Iterator[tuple[Log, Text | MedusaError]]:
        """Yield the end of each log, or what has come since a position in it."""

        def read_one(part: tuple[Log, int | None]) -> Text:
            log, after = part
            found = ask(self._arguments, "logs", {"node": log.node, "log": log.log, "after": after})
            return Text(str(found["text"]), int(found["start"]), int(found["end"]))

        for (log, _), text in _ask_each(parts, read_one):
            yield log, text


class Text(NamedTuple):
    """A part of a log, and where it is in the log's file, in bytes."""

    text: str
    start: int
    end: int


def _ask_each(
    items: Sequence[_Asked], ask_one: Callable[[_Asked], _Answer]
) -> Iterator[tuple[_Asked, _Answer | MedusaError]]:
    """Yield each item with its answer or error, in their order. Several are asked at the same time."""

    def answer(item: _Asked) -> _Answer | MedusaError:
        try:
            return ask_one(item)
        except MedusaError as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from zip(items, pool.map(answer, items), strict=True)


def _chosen(logs: Sequence[Log], name: str) -> list[Log]:
    """Return the logs that a name means: those of an instance, of a model's instances, or of a node's own processes."""
    of_model = re.compile(f"{_INSTANCE}{re.escape(name)}(-[0-9a-f]+-[0-9]+)?")
    return [
        log
        for log in logs
        if log.name == name or (log.node == name and not log.log.startswith(_INSTANCE)) or of_model.fullmatch(log.log)
    ]


class Followed:
    """Logs that are printed, and where each was read to."""

    def __init__(self, nodes: _Nodes, *, lines: int, named: bool, once: bool) -> None:
        """``lines``: how many of a log's last lines are printed at first. ``named``: with each line's log before it.

        ``once``: nothing more will be printed, so a last line without an end is whole.
        """
        self._nodes = nodes
        self._lines = lines
        self._named = named
        self._once = once
        self._positions: dict[str, int] = {}
        self._unfinished: dict[str, str] = {}

    def show(self, logs: Sequence[Log]) -> None:
        """Print what is new in these logs. An instance's log goes with it, so one that is gone is no error."""
        positions = [(log, self._positions.get(log.name)) for log in logs]
        changed = [(log, after) for log, after in positions if after != log.size_bytes]
        for log, text in self._nodes.read(changed):
            if isinstance(text, MedusaError):
                note(for_terminal(f"{log.name}: {text}"))
            else:
                self._show_text(log, text)

    def _show_text(self, log: Log, text: Text) -> None:
        after, unfinished = self._positions.get(log.name), self._unfinished.get(log.name, "")
        self._positions[log.name] = text.end
        if after is not None and text.start != after and unfinished:
            self._print(log, unfinished)  # its end is not in this text
            unfinished = ""
        if after is not None and text.start > after:
            sys.stdout.flush()
            note(for_terminal(f"{log.name}: {size(text.start - after)} were left out; more came at once than is shown"))
        *lines, unfinished = (unfinished + text.text).split("\n")
        if unfinished and (self._once or len(unfinished) > _LONGEST_LINE):
            lines, unfinished = [*lines, unfinished], ""
        self._unfinished[log.name] = unfinished
        for line in lines[-self._lines or len(lines) :] if after is None else lines:
            self._print(log, line)

    def _print(self, log: Log, line: str) -> None:
        print(for_terminal(f"{log.name}: " * self._named + line.expandtabs()))
