"""What probes are told: by whoever accepts connections, from a page of memory that the worker writes."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from .platform import ACCEPTING, LIVE, READY

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.region.reader import Region

    from .platform import Platform

PROBES = {"/livez": LIVE, "/startupz": READY, "/readyz": READY}
_ENGINE = ("", "idle", "starting", "loading", "ready")
_FUNCTION = ("", "loading", "ready")
_READY, _DRAINING, _ENGINE_AT, _FUNCTION_AT = range(4)  # bytes of the page


class ProbeResponse(NamedTuple):
    """A probe's answer: 200 or 503, and the body."""

    good: bool
    status: dict[str, Any]


class Probes:
    """Made before the worker is forked; ``tell`` is the worker's, ``answer`` anybody's, and never waits."""

    def __init__(self, settings: Settings, platform: Platform, region: Region | None) -> None:
        self.kinds = {**PROBES, **platform.probes}
        self._settings = settings
        self._region = region
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def tell(self, *, ready: bool, draining: bool, engine: str, function: str) -> None:
        self._page[:4] = bytes((ready, draining, _ENGINE.index(engine), _FUNCTION.index(function)))

    def answer(self, path: str) -> ProbeResponse | str | None:
        """None when the path is no probe's; a path of the function where that is to be asked, because it is ready."""
        kind = self.kinds.get(path)
        if kind is None:
            return None
        if kind == LIVE:
            return ProbeResponse(True, {"status": "alive"})
        ready, draining = self._page[_READY], self._page[_DRAINING]
        good = not draining and (kind == ACCEPTING or bool(ready))
        return (
            kind if good and kind.startswith("/") else ProbeResponse(good, self._status(ready=ready, draining=draining))
        )

    def _status(self, *, ready: int, draining: int) -> dict[str, Any]:
        """Bytes are of the weights; ``eta_s`` is the rest of the fetch at the present rate."""
        status: dict[str, Any] = {"status": "draining" if draining else "ready" if ready else "starting"}
        if engine := _ENGINE[self._page[_ENGINE_AT]]:
            status |= {"model": served_name(self._settings), "engine": engine}
        if self._region is not None:
            progress = self._region.progress()
            status |= {
                "state": getattr(progress.state, "name", str(progress.state)).lower(),
                "fetched_bytes": progress.fetched_bytes,
                "total_bytes": progress.total_bytes,
                "mb_per_s": progress.mb_per_s,
                "eta_s": progress.eta_s,
            }
        if function := _FUNCTION[self._page[_FUNCTION_AT]]:
            status["handler"] = function
        return status


def served_name(settings: Settings) -> str:
    """The model's name in the OpenAI routes: as given, or the last part of its location, without secrets."""
    from medusa_runtime.storage.base import redacted  # 5 ms that no first answer of /livez should wait for

    return settings.served_model_name or os.path.basename(redacted(settings.model or "").rstrip("/")) or "model"
