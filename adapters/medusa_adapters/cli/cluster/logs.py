"""`medusa cluster logs`: what the processes of nodes, and instances of models, have logged."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from medusa_runtime.errors import ClusterError, MedusaError, UnknownNameError
from medusa_runtime.logs import for_terminal

from ..progress import note, size
from .connection import add_connection, ask

_INSTANCE = "instance-"
_LOOK_S = 1.0
_LINES = 100
_LONGEST_LINE = 1 << 20  # characters; a longer one is shown in parts


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
        return sorted(self._logs(), key=lambda log: log.name)

    def _logs(self) -> Iterator[Log]:
        for name in sorted(str(node["name"]) for node in ask(self._arguments, "status", {})["nodes"]):
            try:
                sizes = ask(self._arguments, "logs", {"node": name})
                yield from (Log(name, str(log), int(size_bytes)) for log, size_bytes in sizes.items())
            except MedusaError as error:
                if name not in self._silent:
                    note(for_terminal(f"{name} is left out: {error}"))
                self._silent.add(name)

    def read(self, log: Log, after: int | None) -> tuple[str, int]:
        """Return the end of a log, or what has come since ``after``, and where that ends. Raises MedusaError."""
        found = ask(self._arguments, "logs", {"node": log.node, "log": log.log, "after": after})
        return str(found["text"]), int(found["end"])


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
        for log in logs:
            after = self._positions.get(log.name)
            if after == log.size_bytes:
                continue
            try:
                text, self._positions[log.name] = self._nodes.read(log, after)
            except MedusaError as error:
                note(for_terminal(f"{log.name}: {error}"))
                continue
            *lines, unfinished = (self._unfinished.get(log.name, "") + text).split("\n")
            if unfinished and (self._once or len(unfinished) > _LONGEST_LINE):
                lines, unfinished = [*lines, unfinished], ""
            self._unfinished[log.name] = unfinished
            for line in lines[-self._lines or len(lines) :] if after is None else lines:
                print(for_terminal(f"{log.name}: " * self._named + line.expandtabs()))
