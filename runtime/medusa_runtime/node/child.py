"""A child process of the agent, and the connection with it, whose end is the child's."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import NamedTuple

from ..errors import NodeError
from ..process import ReportPipe, fork
from ..resource_limits import as_limit_error
from ..timeline import Timeline
from .messages import pair


class Child(NamedTuple):
    pid: int
    channel: socket.socket


def start_child(
    name: str, body: Callable[[socket.socket, Timeline], int], *, timeline: Timeline, reports: ReportPipe
) -> Child:
    """``body`` is given its end of the connection. Raises LimitError or NodeError where there is no room for a process.

    The caller must have a single thread.
    """
    try:
        mine, theirs = pair()
    except OSError as error:
        raise _cannot(name, error) from None
    try:
        pid = fork(name, lambda timeline: body(theirs, timeline), timeline=timeline, reports=reports)
    except OSError as error:
        mine.close()
        raise _cannot(name, error) from None
    finally:
        theirs.close()
    mine.setblocking(False)
    return Child(pid, mine)


def _cannot(name: str, error: OSError) -> Exception:
    return as_limit_error(error) or NodeError(f"the node agent cannot start a {name} process: {error.strerror}")


def end_child(child: Child) -> None:
    """Whatever it is doing; it is to be reaped."""
    child.channel.close()
    os.kill(child.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
