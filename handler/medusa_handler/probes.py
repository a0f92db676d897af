"""What probes are answered, by whichever process accepts connections, from pages of memory that others write."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .platform import ACCEPTING, LIVE, READY

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.liveness import Heartbeats
    from medusa_runtime.region.reader import Region

    from .platform import Platform

PROBES = {"/livez": LIVE, "/startupz": READY, "/readyz": READY}
_ENGINE = ("", "idle", "starting", "loading", "ready")
_FUNCTION = ("", "loading", "ready")
_READY, _DRAINING, _ENGINE_AT, _FUNCTION_AT, _BODIES_FULL = range(5)  # bytes of the page

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_NAMELESS = ("", ".", "..", "model", "models", "main")


class ProbeResponse(NamedTuple):
    """A probe's answer: 200 or 503, and the body."""

    good: bool
    status: dict[str, Any]


class Probes:
    """Made before the worker is forked. The worker calls ``tell``; anybody may call ``answer``, which never waits."""

    def __init__(self, settings: Settings, platform: Platform, region: Region | None, heartbeats: Heartbeats) -> None:
        self.kinds = {**PROBES, **platform.probes}
        self._settings = settings
        self._region = region
        self.heartbeats = heartbeats
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def tell(self, *, ready: bool, draining: bool, engine: str, function: str) -> None:
        self._page[:4] = bytes((ready, draining, _ENGINE.index(engine), _FUNCTION.index(function)))

    def tell_bodies_full(self, full: bool) -> None:
        """Whether the worker has room for another large body, or for one that waits (body_budget.py)."""
        self._page[_BODIES_FULL] = full

    @property
    def bodies_full(self) -> bool:
        return bool(self._page[_BODIES_FULL])

    def answer(self, path: str) -> ProbeResponse | str | None:
        """None when the path is no probe's; a path of the function where that is to be asked, because it is ready."""
        kind = self.kinds.get(path)
        if kind is None:
            return None
        hung = self.heartbeats.hung()
        if kind == LIVE:  # all other processes are replaced from within
            return (
                ProbeResponse(False, _hung(hung)) if "supervisor" in hung else ProbeResponse(True, {"status": "alive"})
            )
        ready, draining = self._page[_READY], self._page[_DRAINING]
        if hung and kind != ACCEPTING and not draining:
            return ProbeResponse(False, self._status(ready=False, draining=False) | _hung(hung))
        good = not draining and (kind == ACCEPTING or bool(ready))
        return (
            kind if good and kind.startswith("/") else ProbeResponse(good, self._status(ready=ready, draining=draining))
        )

    def _status(self, *, ready: int, draining: int) -> dict[str, Any]:
        """Bytes are of the weights; ``eta_s`` is the rest of the fetch at the present rate."""
        status: dict[str, Any] = {"status": "draining" if draining else "ready" if ready else "starting"}
        if engine := _ENGINE[self._page[_ENGINE_AT]]:
            status |= {"model": served_name(self._settings, small_files(self._region)), "engine": engine}
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


def small_files(region: Region | None) -> Callable[[str], bytes | None] | None:
    """What reads a region's small files, once they are there; never waits."""
    return region.file if region is not None and region.progress().state in ("fetching", "done") else None


def _hung(roles: list[str]) -> dict[str, Any]:
    return {"status": "hung", "process": ", ".join(roles)}


def served_name(settings: Settings, read: Callable[[str], bytes | None] | None = None) -> str:
    """The model's name in the OpenAI routes: as given, or what its location says, without secrets.

    That is the last part of a path or URL which names something; of a URL with a host alone, and of a folder that is
    called "model", the name that its config.json has.
    """
    if settings.served_model_name is not None:
        return settings.served_model_name
    from medusa_runtime.storage.base import redacted, scheme_of  # 5 ms that no first answer of /livez should wait for

    url = redacted(settings.model or "").rstrip("/")
    path = (
        url.partition("://")[2].partition("/")[2] if scheme_of(url) in ("http", "https") else url.rpartition("://")[2]
    )
    parts = [part for part in path.split("/") if part]
    if parts and parts[-1].endswith(_WEIGHTS):
        parts[-1:] = [] if len(parts) > 1 else [parts[-1].rpartition(".")[0]]
    if parts and parts[-1] not in _NAMELESS:
        return parts[-1]
    return _name_in(read) or (parts or ["model"])[-1]


def _name_in(read: Callable[[str], bytes | None] | None) -> str | None:
    """The name in a config.json: what the checkpoint was saved from, or the kind of its model."""
    try:
        config = json.loads((read and read("config.json")) or b"{}")
    except ValueError:
        return None
    names = [config.get("_name_or_path"), config.get("model_type")] if isinstance(config, dict) else []
    found = [name.rstrip("/").rpartition("/")[2] for name in names if isinstance(name, str)]
    return next((name for name in found if name and name not in _NAMELESS), None)
