"""What all routes share: the engine, the user's function, admission, and the state that probes tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .admission import Admission
from .faults import ClientGoneError, not_ready, stopping
from .http import sse
from .metrics import Metrics
from .openai.chat_template import ChatTemplate
from .probes import Probes, served_name, small_files

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.engine.client import EngineClient
    from medusa_runtime.instance import InstanceHandle

    from .platform import Platform
    from .user_code.function import UserFunction

_POLL_S = 0.25  # how soon a client that left is noticed
_LONGEST_GUESS_S = 60.0


class Service:
    """Lives in the worker process. Made before Flask is imported, so that probes are answered at once."""

    def __init__(self, instance: InstanceHandle, settings: Settings, platform: Platform, probes: Probes) -> None:
        self.instance = instance
        self.settings = settings
        self.platform = platform
        self.probes = probes
        self.engine = instance.engine
        self.region = instance.region
        self.timeline = instance.timeline
        self.admission = Admission(settings.max_concurrency, settings.max_waiting)
        self.metrics = Metrics()
        self.function: UserFunction | None = None
        self.draining = threading.Event()
        self.created = int(time.time())
        self._answered = threading.Lock()
        self._publishing = threading.Lock()
        self._chat_template: ChatTemplate | None = None

    @property
    def model_name(self) -> str:
        return served_name(self.settings, small_files(self.region))

    @property
    def ready(self) -> bool:
        """Everything a request needs is there; a model that is loaded with the first request is asked for by one."""
        model = self.engine is None or self.engine.ready or self.settings.engine_start == "request"
        return model and (self.function is None or self.function.ready)

    def chat_template(self, gone: Callable[[], bool]) -> ChatTemplate:
        """The checkpoint's chat template, once the prefetcher has brought the small files (it does so first)."""
        if self._chat_template is None:
            assert self.region is not None
            self._wait_for_files(gone)
            self._chat_template = ChatTemplate(self.region.file)
        return self._chat_template

    def _wait_for_files(self, gone: Callable[[], bool]) -> None:
        assert self.region is not None
        deadline = time.monotonic() + self.settings.hold_s
        while True:
            try:
                self.region.wait_index(timeout_s=_POLL_S)
                return
            except TimeoutError:
                pass
            if gone():
                raise ClientGoneError
            if self.draining.is_set():
                raise stopping()
            if time.monotonic() > deadline:
                raise not_ready(f"the model's files were not there within {self.settings.hold_s:g} s of the request")

    def check_hold(self, began: float) -> None:
        """For a request that came at ``began``: 503 when it has waited ``hold_s`` for the model, or will in vain."""
        if self.engine is None or self.engine.ready:
            return
        if self.draining.is_set():
            raise stopping()
        if time.monotonic() - began > self.settings.hold_s:
            text = f"the model was not loaded within {self.settings.hold_s:g} s of the request"
            raise not_ready(text, self.eta_s())

    def first_answer(self) -> bool:
        """True once, for the request that is answered first."""
        return self._answered.acquire(blocking=False)

    def publish(self) -> None:
        """Let probes hear of what has changed in engine or function, or of the drain."""
        with self._publishing:
            self.probes.tell(
                ready=self.ready,
                draining=self.draining.is_set(),
                engine="" if self.engine is None else _engine_status(self.engine),
                function="" if self.function is None else "ready" if self.function.ready else "loading",
            )

    def eta_s(self) -> float:
        """When to come back for what is not there yet.

        While weights are fetched: the rest of the fetch at the present rate. For what comes after it nothing counts
        progress; a start that has taken so long is taken to need as long again.
        """
        fetch_s = 0.0 if self.region is None else self.region.progress().eta_s
        if fetch_s:
            return float(fetch_s)
        stages = self.timeline.stages()
        elapsed_s = (time.monotonic_ns() - stages[0].start_ns) / 1e9 if stages else 1.0
        return min(elapsed_s, _LONGEST_GUESS_S)

    def heartbeat(self) -> bytes:
        """A comment for a silent stream; while the model is fetched it says how far that is."""
        if self.ready or self.region is None:
            return sse.HEARTBEAT
        progress = self.region.progress()
        return sse.waiting(progress.fetched_bytes, progress.total_bytes, self.eta_s())

    def limit_s(self, headers: Mapping[str, str]) -> float | None:
        """How long a request with these headers (names as in "X-Timeout") may take; None: as long as it needs."""
        own = self.platform.limit_s(headers) if self.platform.limit_s is not None else None
        limits = [limit for limit in (own, self.settings.timeout_s or None) if limit is not None]
        return min(limits, default=None)


def _engine_status(engine: EngineClient) -> str:
    if engine.ready:
        return "ready"
    if not engine.started:
        return "idle"
    return "starting" if engine.info is None else "loading"
