"""The answers to probes. The process that accepts connections makes them from memory that other processes write."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

from medusa_runtime.engine.serving.model_name import served_name, small_files

from .platform import ACCEPTING, LIVE, READY

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.liveness import Heartbeats
    from medusa_runtime.region.reader import Region

    from .platform import Platform

# /health is the path that vLLM, TGI and their charts use.
PROBES = {"/livez": LIVE, "/startupz": READY, "/readyz": READY, "/health": READY}
_ENGINE = ("", "idle", "starting", "loading", "ready")
_FUNCTION = ("", "loading", "ready")
_READY, _DRAINING, _ENGINE_AT, _FUNCTION_AT, _BODIES_FULL = range(5)  # bytes of the page


class ProbeResponse(NamedTuple):
    """A probe's answer: 200 or 503, and the body."""

    good: bool
    status: dict[str, Any]


class Probes:
    """The state that probes report, made before the worker is forked.

    The worker calls ``publish``; any process may call ``answer``, which never waits.
    """

    def __init__(self, settings: Settings, platform: Platform, region: Region | None, heartbeats: Heartbeats) -> None:
        self.kinds = {**PROBES, **platform.probes}
        self._more_fields = platform.probe_fields
        self._settings = settings
        self._region = region
        self.heartbeats = heartbeats
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def publish(self, *, ready: bool, draining: bool, engine: str, function: str) -> None:
        self._page[:4] = bytes((ready, draining, _ENGINE.index(engine), _FUNCTION.index(function)))

    def set_bodies_full(self, full: bool) -> None:
        """Note whether the worker can take no further large body, nor let one wait (body_budget.py)."""
        self._page[_BODIES_FULL] = full

    @property
    def bodies_full(self) -> bool:
        return bool(self._page[_BODIES_FULL])

    def answer(self, path: str) -> ProbeResponse | str | None:
        """Return the answer to a probe, None for a path of no probe, or the path of the function that must answer."""
        kind = self.kinds.get(path)
        answer = None if kind is None else self._answer(kind)
        if isinstance(answer, ProbeResponse) and self._more_fields is not None:
            answer.status.update(self._more_fields(path, answer.good))
        return answer

    def _answer(self, kind: str) -> ProbeResponse | str:
        hung = self.heartbeats.hung()
        if kind == LIVE:  # the instance itself replaces all other processes
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
        """Return the body of an answer. Bytes are those of the weights; ``eta_s`` is how long their fetch will take."""
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


def _hung(roles: list[str]) -> dict[str, Any]:
    return {"status": "hung", "process": ", ".join(roles)}
