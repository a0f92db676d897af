"""The prefetcher of a region that the agent holds: a child process, and how the two agree on memory."""

from __future__ import annotations

import importlib
import resource
import socket
from functools import partial
from typing import TYPE_CHECKING

from ...config import Settings
from ...errors import NodeError, from_code
from ...process import ReportPipe
from ...registry import engine_names
from ...timeline import Timeline
from ..asker import Folder, become
from ..child import Child, end_first, start_child
from ..engines.inheritance import close_others
from ..messages import MOST_OF_OURS, close_all, receive, send
from .held_region import HeldRegion

if TYPE_CHECKING:
    from ...region.writer import RegionWriter
    from ...storage.folder import FolderStore

# A prefetcher's own memory: headers, small files, connections. A hostile origin may send as much as is taken.
_MEMORY_BYTES = 1 << 30
# Imported before a prefetcher becomes another user, to whom the agent's files may be closed.
_NEEDED = (
    "concurrent.futures.thread",
    "encodings.ascii",
    "encodings.latin_1",
    "hashlib",
    "medusa_runtime.storage.folder",
    "medusa_runtime.fetch.local_files",
    "medusa_runtime.state.bundle",
    "medusa_runtime.state.key",
    "medusa_runtime.state.manifest",
    "medusa_runtime.state.weight_index",
    "medusa_runtime.checkpoint.archive",
    "medusa_runtime.checkpoint.tensor_pickle",
)


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
    folder = held.folder
    kept = () if folder is None else (folder.fd,)
    close_others(channel.fileno(), held.region.fd, held.demand_fd, timeline.fd, reports.write_fd, *kept)
    end_first()
    _limit_memory()
    from ...fetch.prefetcher import prefetch
    from ...fetch.streams import as_medusa
    from ...state.restore import Restoration

    restoring = Restoration(settings, timeline, engines=engine_names())  # nobody has said yet whose model it will be
    writer = held.region.writer()
    writer.demand.listen(held.demand_fd)
    try:
        store = None if folder is None else _open(held.key, folder)
        prefetch(
            held.region,
            held.key,
            settings=settings,
            timeline=timeline,
            writer=writer,
            keeper=_Agent(channel, store),
            restoring=restoring,
            store=store,
        )
    except Exception as error:  # noqa: BLE001  it stands in the region, where the agent finds it
        writer.fail(as_medusa(error))
        return 1
    return 0


def _open(key: str, folder: Folder) -> FolderStore:
    from ...checkpoint.reader import split
    from ...storage.folder import FolderStore

    if folder.asker is not None:
        for name in _NEEDED:
            importlib.import_module(name)
        become(folder.asker)
    return FolderStore(split(key)[0], folder.fd, confined=folder.asker is not None and folder.asker.confined)


def _limit_memory() -> None:
    with open("/proc/self/status", "rb") as status:
        data_kb = next(int(line.split()[1]) for line in status if line.startswith(b"VmData:"))
    limit = (data_kb << 10) + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Agent:
    """The prefetcher's view of the agent."""

    def __init__(self, channel: socket.socket, store: FolderStore | None) -> None:
        self._channel = channel
        self._store = store

    def admit(self, region_bytes: int) -> None:
        send(self._channel, "room", {"bytes": region_bytes})
        answer = receive(self._channel)
        if answer is None:
            raise NodeError("the node agent ended")
        if answer.kind == "error":
            raise from_code(answer.body["code"], answer.body["message"])

    def laid_out(self, writer: RegionWriter) -> None:
        writer.seal_early()
        shards = [shard for shard in writer.index.shards if self._store is not None]
        files = [self._store.descriptor(shard.name) for shard in shards[: MOST_OF_OURS + 1] if self._store is not None]
        try:
            send(self._channel, "sealed", None, files if len(files) <= MOST_OF_OURS - 8 else ())
        finally:
            close_all(files)
