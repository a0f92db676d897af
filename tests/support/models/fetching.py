"""A checkpoint's bytes in a region, fetched in this process."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline


def fetch_into(region: Region, url: str, settings: Settings | None = None, **options: Any) -> None:
    """Fetch all of a checkpoint. ``options`` are further ones of ``prefetch``."""
    with closing(Timeline.create("prefetcher")) as timeline:
        prefetch(region, url, settings=settings or Settings(), timeline=timeline, **options)
