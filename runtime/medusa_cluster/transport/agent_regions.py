"""The regions of a node's agent, held for as long as peers read them."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from medusa_runtime.errors import MedusaError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.region.checksummed import ChecksummedRegion
from medusa_runtime.region.layout import State
from medusa_runtime.storage.base import redacted

logger = logging.getLogger(__name__)

_UNUSED_S = 2.0  # then a region is given back, because a lease keeps the agent from evicting it
_AGAIN_S = 0.02  # between two questions for a region that the agent does not have
_LAID_OUT_WITHIN_S = 10.0
_MOST_ASKED = 64  # models, at once: while its store has not sent the index, one takes a thread for as long as that


@dataclass(eq=False)
class _Lease:
    """A region, the connection to the agent that keeps it, and the number of requests that read it."""

    client: NodeClient
    region: ChecksummedRegion
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        self.region.close()
        self.client.close()


def _give_back(asked: Future[_Lease]) -> None:
    """Close the lease that a thread was asked for, if it got one."""
    if not asked.cancelled() and asked.exception() is None:
        asked.result().close()


class AgentRegions:
    """The regions that the node's agent holds or fetches; asking for one never begins a fetch.

    A ``RegionSource``. Use it in one event loop only.
    """

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._current: dict[str, _Lease] = {}
        self._leases: dict[ChecksummedRegion, _Lease] = {}
        self._opening: dict[str, asyncio.Task[_Lease | None]] = {}
        self._threads = ThreadPoolExecutor(_MOST_ASKED, "regions")
        self._sweeping: asyncio.TimerHandle | None = None

    async def acquire(self, url: str, *, current: bool, within_s: float) -> ChecksummedRegion | None:
        lease = self._current.get(url)
        if lease is None or current or lease.region.state == State.FAILED:
            lease = await self._open(url, within_s)
            if lease is None:
                return None
        lease.users += 1
        return lease.region

    async def _open(self, url: str, within_s: float) -> _Lease | None:
        """Ask the agent. Simultaneous requests for the same model share one answer."""
        task = self._opening.get(url)
        if task is None:
            task = self._opening[url] = asyncio.create_task(self._ask_until(url, time.monotonic() + within_s))
            task.add_done_callback(lambda _: self._opening.pop(url, None))
        return await asyncio.shield(task)

    async def _ask_until(self, url: str, deadline: float) -> _Lease | None:
        while True:
            try:
                lease = await self._ask_in_thread(url)
            except MedusaError as error:
                logger.debug("%s: %s", redacted(url), error)
                if time.monotonic() > deadline:
                    return None
                await asyncio.sleep(_AGAIN_S)
                continue
            before = self._current.get(url)
            self._current[url] = self._leases[lease.region] = lease
            if before is not None and not before.users:
                self._close(before)
            self._sweep_later()
            return lease

    async def _ask_in_thread(self, url: str) -> _Lease:
        asking = self._threads.submit(self._ask, url)
        try:
            return await asyncio.wrap_future(asking)
        except asyncio.CancelledError:  # the thread goes on
            asking.add_done_callback(_give_back)
            raise

    def _ask(self, url: str) -> _Lease:
        """Take a lease of a region that the agent has or fetches. Blocks; call it in a thread. Raises MedusaError."""
        client = NodeClient(self._path)
        try:
            region = client.region(url, background=True, existing_only=True, timeout_s=_LAID_OUT_WITHIN_S)
            return _Lease(client, ChecksummedRegion(region))
        except BaseException:
            client.close()
            raise

    def release(self, region: ChecksummedRegion) -> None:
        lease = self._leases[region]
        lease.users -= 1
        lease.used_at = time.monotonic()
        if not lease.users and lease not in self._current.values():
            self._close(lease)

    def _sweep_later(self) -> None:
        if self._sweeping is None and self._current:
            self._sweeping = asyncio.get_running_loop().call_later(_UNUSED_S / 2, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        old = time.monotonic() - _UNUSED_S
        for url, lease in list(self._current.items()):
            if not lease.users and lease.used_at < old:
                del self._current[url]
                self._close(lease)
        self._sweep_later()

    def _close(self, lease: _Lease) -> None:
        self._leases.pop(lease.region, None)
        lease.close()

    def close(self) -> None:
        """Give all regions back. Call this after the server has ended."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for lease in list(self._leases.values()):
            self._close(lease)
        self._current.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


__all__ = ["AgentRegions"]
