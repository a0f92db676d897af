"""The regions of a node's agent, as the node's server holds them."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any

from medusa_cluster.transport.agent_regions import AgentRegions, _Lease
from medusa_runtime.checkpoint.index import Shard, TensorEntry, WeightIndex
from medusa_runtime.region.checksummed import ChecksummedRegion
from medusa_runtime.region.reader import Region
from medusa_runtime.storage.framing import PEER_CHUNK_BYTES
from waiting import until


def test_a_region_that_comes_when_nobody_waits_for_it_any_more_is_given_back() -> None:
    asked, answered, given_back = threading.Event(), threading.Event(), threading.Event()
    index = WeightIndex([Shard("a.safetensors", 200, 100, '"v1"')], {"w": TensorEntry(0, 0, 100, "U8", (100,))})
    with closing(Region.create()) as region, closing(region.writer()) as writer:
        writer.lay_out(index, {}, {}, PEER_CHUNK_BYTES[0])
        client: Any = SimpleNamespace(close=given_back.set)
        lease = _Lease(client, ChecksummedRegion(Region(os.dup(region.fd))))

        class SlowAgent(AgentRegions):
            def _ask(self, url: str) -> _Lease:
                asked.set()
                answered.wait(240)
                return lease

        async def run() -> None:
            regions = SlowAgent("/nowhere")
            asyncio.create_task(regions.acquire("s3://bucket/model", current=False, within_s=240))  # noqa: RUF006
            await asyncio.to_thread(asked.wait, 240)
            regions.close()

        asyncio.run(run())  # it cancels the tasks that are left
        answered.set()
        until(given_back.is_set)
        assert lease.region.file.closed
