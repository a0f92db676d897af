"""What all routes share: the model, the user's function, admission, and the state that probes report."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from medusa_runtime.registry import NO_ENGINE, engine_kind, imported

from .admission import Admission
from .logprob_budget import LogprobBudget
from .metrics import Metrics
from .model.served_model import ServedModel

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.instance import InstanceHandle

    from .platform import Platform
    from .probes import Probes
    from .user_code.function import UserFunction


def http_support(settings: Settings) -> tuple[bool, bool]:
    """Return whether the engine has an HTTP server of its own, and whether our routes answer what they support.

    Raises ConfigError if that server's flags cannot be used.
    """
    http = "" if settings.engine == NO_ENGINE else engine_kind(settings.engine).http
    return bool(http), not http or bool(imported(http)(settings))


class Service:
    """The state of one instance, in the worker. It is made before Flask is imported, so probes are answered at once."""

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
        self.logprobs = LogprobBudget()
        self.draining = threading.Event()
        self.model = ServedModel(
            settings, self.engine, self.region, self.timeline, metrics=self.metrics, draining=self.draining
        )
        self.can_relay, self.own_routes = http_support(settings)
        self.function: UserFunction | None = None
        self.created = int(time.time())
        self._answered = threading.Lock()
        self._publishing = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether everything that a request needs is there; a model that the first request loads counts as there."""
        return self.model.ready and (self.function is None or self.function.ready)

    def claim_first_answer(self) -> bool:
        """Return True once: to the first request that is answered."""
        return self._answered.acquire(blocking=False)

    def publish(self) -> None:
        """Write the state of engine, function and drain where the process that answers probes reads it."""
        with self._publishing:
            self.probes.publish(
                ready=self.ready,
                draining=self.draining.is_set(),
                engine=self.model.engine_status,
                function="" if self.function is None else "ready" if self.function.ready else "loading",
            )

    def engine_changed(self) -> None:
        """Publish the engine's state. Once it is ready, the rest of the start is done."""
        self.publish()
        if self.engine is not None and self.engine.ready:
            self.model.finish_start()

    def function_loaded(self) -> None:
        """Let the requests that waited for the function begin."""
        self.publish()
        self.admission.open()

    def request_timeout_s(self, headers: Mapping[str, str]) -> float | None:
        """Return how many seconds a request with these headers (such as "X-Timeout") may take; None for no limit."""
        own = self.platform.timeout_s(headers) if self.platform.timeout_s is not None else None
        timeouts = [each for each in (own, self.settings.timeout_s or None) if each is not None]
        return min(timeouts, default=None)
