"""The prefetcher of a region that the agent holds: a child process, and how the two agree on memory."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING

from ..config import Settings
from ..errors import NodeError, from_code
from ..process import ReportPipe, fork
from ..timeline import Timeline
from .held_region import Fetch, HeldRegion
from .inheritance import close_others
from .messages import pair, receive, send

if TYPE_CHECKING:
    from ..weights.region_writer import RegionWriter


def start_fetch(held: HeldRegion, settings: Settings, *, timeline: Timeline, reports: ReportPipe) -> Fetch:
    """Fork a prefetcher for this region. The caller must have a single thread."""
    mine, theirs = pair()
    mine.setblocking(False)
    body = partial(_run, held, theirs, settings, reports)
    pid = fork("prefetcher", body, timeline=timeline, reports=reports)
    theirs.close()
    return Fetch(pid, mine)


def end_fetch(fetch: Fetch) -> None:
    """Whatever it is doing; it is to be reaped. Its region keeps what came."""
    fetch.channel.close()
    os.kill(fetch.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own


def give_back(held: HeldRegion, *, timeline: Timeline, reports: ReportPipe) -> int:
    """Close a region by the end of a child, whose pid this is: it keeps the kernel busy for a second.

    The caller must have a single thread.
    """
    mine, theirs = pair()

    def body(_: Timeline) -> int:
        close_others(theirs.fileno(), held.region.fd)
        receive(theirs)  # until the agent has closed it
        return 0

    pid = fork("release", body, timeline=timeline, reports=reports)
    for channel in (held, mine, theirs):
        channel.close()
    return pid


def _run(held: HeldRegion, channel: socket.socket, settings: Settings, reports: ReportPipe, timeline: Timeline) -> int:
    close_others(channel.fileno(), held.region.fd, held.asking_fd, timeline.fd, reports.write_fd)
    from ..state.restore import Restoration
    from ..weights.prefetcher import prefetch

    restoring = Restoration(settings, timeline, engines=("torch", "vllm"))  # nobody has said yet whose model it will be
    writer = held.region.writer()
    writer.listen(held.asking_fd)
    try:
        prefetch(
            held.region,
            held.key,
            settings=settings,
            timeline=timeline,
            writer=writer,
            keeper=_Agent(channel),
            restoring=restoring,
        )
    except Exception:  # noqa: BLE001  it stands in the region, where the agent finds it
        return 1
    return 0


class _Agent:
    """The prefetcher's view of the agent."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def admit(self, region_bytes: int) -> None:
        send(self._channel, "room", {"bytes": region_bytes})
        answer = receive(self._channel)
        if answer is None:
            raise NodeError("the node agent ended")
        if answer.kind == "error":
            raise from_code(answer.body["code"], answer.body["message"])

    def laid_out(self, writer: RegionWriter) -> None:
        writer.seal_early()
        send(self._channel, "sealed")
