"""The prefetcher of a region that the agent holds: a child process, and how the two agree on memory."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING

from ...config import Settings
from ...errors import NodeError, from_code
from ...process import ReportPipe
from ...registry import engine_names
from ...timeline import Timeline
from ..child import Child, start_child
from ..engines.inheritance import close_others
from ..messages import receive, send
from .held_region import HeldRegion

if TYPE_CHECKING:
    from ...region.writer import RegionWriter


def start_fetch(held: HeldRegion, settings: Settings, *, timeline: Timeline, reports: ReportPipe) -> Child:
    """Fork a prefetcher for this region. Raises what ``start_child`` does."""
    return start_child("prefetcher", partial(_run, held, settings, reports), timeline=timeline, reports=reports)


def give_back(held: HeldRegion, *, timeline: Timeline, reports: ReportPipe) -> int:
    """Close a region by the end of a child, whose pid this is: it keeps the kernel busy for a second.

    Raises what ``start_child`` does.
    """

    def body(channel: socket.socket, _: Timeline) -> int:
        close_others(channel.fileno(), held.region.fd)
        receive(channel)  # until the agent has closed it
        return 0

    child = start_child("release", body, timeline=timeline, reports=reports)
    held.close()
    child.channel.close()
    return child.pid


def _run(held: HeldRegion, settings: Settings, reports: ReportPipe, channel: socket.socket, timeline: Timeline) -> int:
    close_others(channel.fileno(), held.region.fd, held.demand_fd, timeline.fd, reports.write_fd)
    from ...fetch.prefetcher import prefetch
    from ...state.restore import Restoration

    restoring = Restoration(settings, timeline, engines=engine_names())  # nobody has said yet whose model it will be
    writer = held.region.writer()
    writer.listen(held.demand_fd)
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
