"""Our prefetcher as a client of the fetch benchmark: it has this process for itself, as it has in `medusa serve`."""

from __future__ import annotations

import os
from collections.abc import Callable

from medusa_adapters.bench.client import Buffers, Client, Job, main

_ROOM_BYTES = 4 << 20  # beside the data a region holds its header, the chunk table, the index and small files


def prepare(job: Job) -> Callable[[], Buffers]:
    """Into a region whose pages are in memory already, or into a new one where the job says fresh."""
    from medusa_runtime.weights.prefetcher import prefetch
    from medusa_runtime.weights.region import Region

    region = Region.create()
    if not job.fresh:
        os.posix_fallocate(region.fd, 0, job.size_bytes + _ROOM_BYTES)
    url = f"s3://{job.bucket}/{job.key.rpartition('/')[0]}"

    def fetch() -> Buffers:
        prefetch(region, url)
        return [memoryview(bytes(job.data_start)), region.shard(0)]

    return fetch


CLIENTS: dict[str, Client] = {"medusa": prepare}

if __name__ == "__main__":
    main(CLIENTS)
