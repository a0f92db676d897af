"""Our prefetcher as a client of the fetch benchmark. It has a process of its own, as in `medusa serve`."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.fetch.client import Buffers, Client, Job, main

_ROOM_BYTES = 4 << 20  # for the region's header, chunk table, index and small files


def prepare(job: Job) -> Callable[[], Buffers]:
    """Prepare a fetch into a region whose memory is already reserved, or into a new one if the job is ``fresh``."""
    import medusa_runtime.storage.s3  # noqa: F401  else the fetch would import it, because of the URL's scheme
    from medusa_runtime.config import Settings
    from medusa_runtime.fetch.prefetcher import BESIDE_IMPORTS, prefetch
    from medusa_runtime.region.reader import Region
    from medusa_runtime.timeline import Timeline

    region = Region.create()
    writer = region.writer()
    if not job.fresh:
        writer.reserve(job.size_bytes + _ROOM_BYTES)
    timeline = Timeline.create("prefetcher")
    url = f"s3://{job.bucket}/{job.key.rpartition('/')[0]}"

    def fetch() -> Buffers:
        nice = BESIDE_IMPORTS if job.beside_imports else 0
        prefetch(region, url, settings=Settings(), timeline=timeline, writer=writer, nice=nice)
        return [memoryview(bytes(job.data_start)), region.shard(0)]

    return fetch


CLIENTS: dict[str, Client] = {"medusa": prepare}

if __name__ == "__main__":
    main(CLIENTS)
