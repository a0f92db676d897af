"""Starts vLLM offline: does what an instance's other processes have done before its engine starts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams
from medusa_runtime.errors import EngineError
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .imports import preimport

if TYPE_CHECKING:
    from .engine import VllmEngine

Result = TypeVar("Result")


def fetch_and_import(settings: Settings) -> tuple[Region, Timeline]:
    """Fetch ``settings.model`` into a region, and import vLLM for it."""
    assert settings.model is not None
    region, timeline = Region.create(), Timeline.create("offline")
    prefetch(region, settings.model, settings=settings, timeline=timeline)
    preimport(settings, region)
    return region, timeline


def load(engine: VllmEngine) -> None:
    """Let an engine do what it does before it serves: load, compile and capture."""
    stop = threading.Event()
    stop.set()
    engine.run(stop)


def serve_beside(engine: VllmEngine, work: Callable[[], Result]) -> Result:
    """Let an engine load and serve, while ``work`` runs in another thread. Return its result, or raise its error.

    The engine can load nothing and serve nobody afterwards; it is not closed.
    """
    engine.mounts_when_idle = False  # it would take memory beside what is measured, and leave sockets in /tmp
    stop, found = threading.Event(), queue.SimpleQueue[Callable[[], Result]]()

    def run() -> None:
        try:
            engine.wait_ready()
            result = work()
            found.put(lambda: result)
        except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
            found.put(partial(_raise, error))
        finally:
            stop.set()

    threading.Thread(target=run, name="offline", daemon=True).start()
    engine.run(stop)
    return found.get()()


def _raise(error: BaseException) -> NoReturn:
    raise error


def complete(engine: VllmEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str) -> None:
    """Let the engine complete these prompts, which are token ids. Raises EngineError if one is not completed."""
    ended = queue.SimpleQueue[Delta]()

    def sink(delta: Delta) -> None:
        if delta.finish_reason is not None:
            ended.put(delta)

    for number, prompt in enumerate(prompts):
        engine.add(GenerateRequest(f"{name}-{number}", tuple(prompt), params), sink)
    for prompt in prompts:
        if (reason := ended.get().finish_reason) not in ("length", "stop"):
            raise EngineError(f"a prompt of {len(prompt)} tokens ended with {reason}, expected a completion")


__all__ = ["complete", "fetch_and_import", "load", "serve_beside"]
