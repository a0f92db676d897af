"""The prefetcher of a region that the agent holds: a child process that asks the agent for memory."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...config import Settings
from ...errors import NodeError, from_code
from ...liveness import Heartbeats
from ...process import ReportPipe, end_first, name_process
from ...process_limits import used_bytes
from ...region.pages import prefault_private_pages
from ...region.reader import Region
from ...registry import engine_names
from ...storage.base import Store, open_store
from ...storage.local import LocalStore
from ...timeline import Timeline
from ..callers.impersonation import Folder, assume_identity
from ..callers.policy import Policy
from ..child import REAPER, Child, close_others, start_child
from ..messages import MOST_INTERNAL_DESCRIPTORS, close_without_linger, receive, send
from ..shard_files import hold
from .region_entry import RegionEntry, open_region
from .spare import Spare

if TYPE_CHECKING:
    from ...region.writer import RegionWriter
    from ...storage.folder import FolderStore
    from ...storage.sources import SourcesStore
    from .cluster_sources import ClusterAccess

# The limit of a prefetcher's own memory, for headers, small files and connections. A hostile server may send a lot.
_MEMORY_BYTES = 1 << 30
# Imported before a prefetcher becomes another user, which may not be able to read the agent's files.
_NEEDED = (
    "concurrent.futures.thread",
    "encodings.ascii",
    "encodings.latin_1",
    "hashlib",
    "medusa_runtime.storage.folder",
    "medusa_runtime.fetch.local_files",
    "medusa_runtime.state.bundle.reader",
    "medusa_runtime.state.key",
    "medusa_runtime.state.bundle.manifest",
    "medusa_runtime.state.weight_index",
    "medusa_runtime.checkpoint.archive",
    "medusa_runtime.checkpoint.tensor_pickle",
)

# Imported by the agent, to save each prefetcher a tenth of a second, or more if the cores are busy.
_PRELOADED = (
    "concurrent.futures.thread",
    "random",
    "medusa_runtime.fetch.prefetcher",
    "medusa_runtime.region.writer",
    "medusa_runtime.state.restore",
    "medusa_runtime.storage.http.store",
)
_PRELOADED_IN_CLUSTER = (
    "xxhash",
    "medusa_runtime.fetch.peer_checkpoint",
    "medusa_runtime.node.regions.cluster_sources",
)


def preload(*, in_cluster: bool) -> None:
    """Import what every prefetcher needs. This starts no threads."""
    for name in (*_PRELOADED, *(_PRELOADED_IN_CLUSTER if in_cluster else ())):
        importlib.import_module(name)
    if in_cluster:
        from ...storage.compiled_chunks import compiled_functions

        compiled_functions()


def start_fetch(
    entry: RegionEntry,
    settings: Settings,
    *,
    policy: Policy,
    cluster: ClusterAccess | None,
    timeline: Timeline,
    reports: ReportPipe,
) -> Child:
    """Fork a prefetcher for this region. Its heartbeats are in ``entry.heartbeats``. Raises like ``start_child``.

    ``cluster`` is where it asks for peers that have the model.
    """
    body = partial(_run_prefetcher, entry, settings, policy, cluster, reports)
    return start_child("prefetcher", body, timeline=timeline, reports=reports)


def start_spare(
    size_bytes: int, *, policy: Policy, cluster: ClusterAccess | None, timeline: Timeline, reports: ReportPipe
) -> Spare:
    """Fork a prefetcher for the next model of a store, with a region for which ``size_bytes`` of pages are allocated.

    Raises like ``start_child``.
    """
    region, demand_fd = open_region()
    heartbeats = Heartbeats()
    body = partial(_run_spare, region, demand_fd, heartbeats, size_bytes, policy, cluster, reports)
    try:
        child = start_child("spare", body, timeline=timeline, reports=reports)
    except BaseException:
        region.close()
        os.close(demand_fd)
        raise
    return Spare(region, demand_fd, heartbeats, child, size_bytes)


def open_store_of(key: str, policy: Policy) -> Store:
    """Open the store of a checkpoint that is not local. Redirects are followed as the policy allows."""
    from ...checkpoint.reader import split_url
    from ...storage.http.store import HttpStore

    store = open_store(split_url(key)[0])
    if isinstance(store, HttpStore):
        store.limit_redirects(policy.allows_redirect)
    return store


def close_in_child(entry: RegionEntry, *, timeline: Timeline, reports: ReportPipe) -> int:
    """Close a region, and let a child hold it last. Returns the child's pid. Raises like ``start_child``.

    Whichever process holds a region last must wait up to a second while the kernel frees its pages. Whichever holds a
    caller's files last may have to wait for their file system.
    """

    def body(channel: socket.socket, _: Timeline) -> int:
        close_others(channel.fileno(), entry.region.fd, *entry.files)
        receive(channel)  # returns when the agent has closed its end, and so the region
        return 0

    child = start_child("release", body, timeline=timeline, reports=reports)
    entry.close()
    child.channel.close()
    return child.pid


def assign_spare(spare: Spare, entry: RegionEntry, connections: int | None) -> bool:
    """Let a spare fill its region, which is now that of ``entry``. Return False if its process has just died."""
    try:
        send(spare.child.channel, "fetch", {"key": entry.key, "connections": connections, "layers": entry.layers})
    except OSError:
        REAPER.kill(spare.child)
        return False
    return True


def _run_spare(
    region: Region,
    demand_fd: int,
    heartbeats: Heartbeats,
    size_bytes: int,
    policy: Policy,
    cluster: ClusterAccess | None,
    reports: ReportPipe,
    channel: socket.socket,
    timeline: Timeline,
) -> int:
    """Allocate pages, then wait, perhaps for hours, until the agent names a model to fetch. Return the exit status."""
    close_others(channel.fileno(), region.fd, demand_fd, timeline.fd, reports.write_fd)
    end_first()
    writer = region.writer()
    reserving = threading.Thread(target=_reserve, args=(writer, size_bytes), daemon=True)
    reserving.start()
    reserving.join()
    gc.freeze()  # or a collection during the fetch would write to, and so copy, the pages of all objects
    prefault_private_pages()
    send(channel, "ready")
    message = receive(channel)
    if message is None:
        return 0
    name_process("prefetcher")
    entry = RegionEntry(message.body["key"], spare=Spare(region, demand_fd, heartbeats, Child(0, channel), size_bytes))
    settings = fetch_settings(entry.key, message.body["connections"], message.body["layers"])
    return _Fetch(entry, settings, policy, cluster, channel, timeline.named("prefetcher")).run(writer)


def _reserve(writer: RegionWriter, size_bytes: int) -> None:
    os.nice(19)  # on Linux this concerns only this thread
    writer.reserve(size_bytes)


def fetch_settings(key: str, connections: int | None, layers: str | None) -> Settings:
    """Return the settings of an agent's fetch. ``layers`` (START:STOP) come first."""
    return Settings(model=key, connections=connections, load_priority="background", layers=layers)


def _run_prefetcher(
    entry: RegionEntry,
    settings: Settings,
    policy: Policy,
    cluster: ClusterAccess | None,
    reports: ReportPipe,
    channel: socket.socket,
    timeline: Timeline,
) -> int:
    kept = () if entry.folder is None else (entry.folder.fd,)
    close_others(channel.fileno(), entry.region.fd, entry.demand_fd, timeline.fd, reports.write_fd, *kept)
    end_first()
    return _Fetch(entry, settings, policy, cluster, channel, timeline).run(entry.region.writer())


class _Fetch(NamedTuple):
    """A fetch into the region of ``entry``, in the process that makes it. ``channel`` leads to the agent."""

    entry: RegionEntry
    settings: Settings
    policy: Policy
    cluster: ClusterAccess | None
    channel: socket.socket
    timeline: Timeline

    def run(self, writer: RegionWriter) -> int:
        """Fetch, and return the process's exit status."""
        from ...fetch.streams import as_medusa_error

        try:
            self._fetch(writer)
        except Exception as error:  # noqa: BLE001  it stands in the region, where the agent finds it
            writer.fail(as_medusa_error(error))
            return 1
        return 0

    def _fetch(self, writer: RegionWriter) -> None:
        entry, settings, channel = self.entry, self.settings, self.channel
        folder = entry.folder
        cluster = self.cluster if folder is None else None
        limit_memory()
        from ...fetch.prefetcher import prefetch
        from ...state.restore import BundleRestorer

        # For all engines, because it is not known yet which functions will use the model.
        bundle = BundleRestorer(settings, self.timeline, engines=engine_names(), for_peers=cluster is not None)
        paced = self.cluster is not None or settings.layers is not None
        writer.demand.listen(entry.demand_fd, paced=paced and not self.policy.serves_others)
        store = open_store_of(entry.key, self.policy) if folder is None else _open_folder(entry.key, folder)
        entry.heartbeats.keep("prefetcher")  # not earlier: this starts a thread, which must have the final rights
        sources = None if cluster is None else _open_sources(cluster, entry.key, store, channel)
        prefetch(
            entry.region,
            entry.key,
            settings=settings,
            timeline=self.timeline,
            writer=writer,
            owner=_Agent(channel, store if isinstance(store, LocalStore) else None),
            bundle=bundle,
            store=store,
            sources=sources,
        )
        if sources is not None:
            report_sources(channel, sources)


def _open_sources(cluster: ClusterAccess, key: str, origin: Store, channel: socket.socket) -> SourcesStore:
    from .cluster_sources import open_sources

    sources = open_sources(cluster, key, origin, lambda: report_sources(channel, sources))
    return sources


def report_sources(channel: socket.socket, sources: SourcesStore) -> None:
    """Report to the agent how much came from which source. A fetch never fails because this cannot be sent."""
    with suppress(OSError, NodeError):  # the agent reads too slowly, or has ended, or there are too many peers
        send(channel, "sources", sources.status())


def _open_folder(key: str, folder: Folder) -> FolderStore:
    from ...checkpoint.reader import split_url
    from ...storage.folder import FolderStore

    if folder.identity is not None:
        for name in _NEEDED:
            importlib.import_module(name)
        assume_identity(folder.identity)
    return FolderStore(split_url(key)[0], folder.fd, confined=folder.identity is not None and folder.identity.confined)


def limit_memory() -> None:
    """Limit this process's own memory, before it reads what a store sends."""
    limit = used_bytes(resource.RLIMIT_DATA) + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Agent:
    """The agent as the prefetcher's ``RegionOwner``."""

    def __init__(self, channel: socket.socket, store: LocalStore | None) -> None:
        self._channel = channel
        self._store = store

    def admit(self, region_bytes: int) -> None:
        send(self._channel, "room", {"bytes": region_bytes})
        answer = receive(self._channel)
        if answer is None:
            raise NodeError("the node agent ended")
        if answer.kind == "error":
            raise from_code(answer.body["code"], answer.body["message"])

    def on_laid_out(self, writer: RegionWriter) -> None:
        writer.seal_early()
        shards = [shard for shard in writer.index.shards if self._store is not None]
        files = [
            self._store.descriptor(shard.name)
            for shard in shards[: MOST_INTERNAL_DESCRIPTORS + 1]
            if self._store is not None
        ]
        try:
            held = hold(files)
        finally:
            close_without_linger(files)
        send(self._channel, "sealed", None, [] if held is None else [held.fileno()])
        if held is not None:
            held.close()
