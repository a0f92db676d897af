"""Get a LoRA adapter's region for the function process: from the node agent, or filled by a thread of this process."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..checkpoint.adapter import ADAPTER_FILES, adapter_urls
from ..config import NODE_SOCKET, Settings
from ..errors import MedusaError, NodeError, ObjectNotFoundError, TooLargeError
from ..process_limits import as_limit_error
from ..region.reader import Region
from ..timeline import Timeline
from .supervisor import has_agent

if TYPE_CHECKING:
    from ..node.client import NodeClient
    from ..region.writer import RegionWriter

logger = logging.getLogger(__name__)

_MB = 10**6


class AdapterRegion(NamedTuple):
    """An adapter's region. Its index is there, while the rest may still be fetched.

    ``lease`` is the connection for as long as which the agent keeps the region; None for a region of this process.
    """

    region: Region
    lease: NodeClient | None

    @property
    def failed(self) -> bool:
        """Whether the region will never be complete: its fetch has failed, or the agent that fetched it has ended."""
        state = self.region.progress().state
        if state == "done" or self.lease is None or not self.lease.has_loss():
            return state == "failed"
        return self.lease.read_loss() is not None

    def close(self) -> None:
        self.region.close()
        if self.lease is not None:
            self.lease.close()


def open_adapter(url: str, settings: Settings, timeline: Timeline) -> AdapterRegion:
    """Start to fetch the adapter at ``url``, a folder or a file, and return when its index is there.

    Raises the store's errors, CorruptError, or TooLargeError if it has more than ``--max-lora-mb``.
    """
    *first, last = adapter_urls(url)
    for candidate in first:
        try:
            return _open(candidate, settings, timeline)
        except ObjectNotFoundError:
            continue
    try:
        return _open(last, settings, timeline)
    except ObjectNotFoundError as error:
        if not first:
            raise
        names = " or ".join(ADAPTER_FILES)  # not those in the URLs, which may have a query with a signature
        raise ObjectNotFoundError(f"expected {names} in an adapter's folder, found neither: {error}") from None


def _open(url: str, settings: Settings, timeline: Timeline) -> AdapterRegion:
    held = _from_agent(url, settings) if has_agent(settings) else None
    if held is None:
        held = AdapterRegion(_fetched(url, settings, timeline), None)
    try:
        _check_size(held.region.wait_index().total_bytes, settings)
    except BaseException:
        held.close()
        raise
    return held


def _from_agent(url: str, settings: Settings) -> AdapterRegion | None:
    """Ask the agent for the region; None if it refuses. Raises the store's error if the agent could not fetch it."""
    from ..node.client import NodeClient

    try:
        client = NodeClient(settings.node_socket or NODE_SOCKET, settings.node_user)
        try:
            return AdapterRegion(client.region(url), client)
        except BaseException:
            client.close()
            raise
    except (NodeError, OSError) as error:
        logger.warning("an adapter is fetched without the node agent: %s", error)
        return None


def _fetched(url: str, settings: Settings, timeline: Timeline) -> Region:
    """Make a region that a thread fills, and return it when it is sealed, or its fetch has failed."""
    region, owner = Region.create(), _AdapterOwner(settings)
    arguments = region, url, settings, timeline, owner
    try:
        threading.Thread(target=_fetch, args=arguments, name="adapter-fetch", daemon=True).start()
    except RuntimeError as error:
        region.close()
        raise as_limit_error(error) or error from error
    owner.sealed.wait()
    return region


def _fetch(region: Region, url: str, settings: Settings, timeline: Timeline, owner: _AdapterOwner) -> None:
    from ..fetch.prefetcher import prefetch  # 20 ms, and only functions with adapters need it

    own = replace(settings, layers=None, memory_limit_mb=None, engine="torch")
    try:
        prefetch(region, url, settings=own, timeline=timeline.named("adapter"), owner=owner)
    except MedusaError:
        pass  # the error is stored in the region, where everything that waits for the adapter finds it
    except Exception:
        logger.exception("an adapter could not be fetched")
    finally:
        owner.sealed.set()


class _AdapterOwner:
    """Limits an adapter's size, and seals its region before the engine gets it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.sealed = threading.Event()

    def admit(self, region_bytes: int) -> None:
        _check_size(region_bytes, self._settings)

    def on_laid_out(self, writer: RegionWriter) -> None:
        writer.seal_early()
        self.sealed.set()


def _check_size(size_bytes: int, settings: Settings) -> None:
    if size_bytes > settings.max_lora_mb * _MB:
        raise TooLargeError(
            f"the adapter takes {size_bytes / _MB:,.0f} MB; expected at most {settings.max_lora_mb} MB (--max-lora-mb)"
        )


__all__ = ["AdapterRegion", "open_adapter"]
