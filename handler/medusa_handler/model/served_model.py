"""The model that an instance serves: its engine, its small files, and when requests can expect it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from medusa_runtime.engine.serving.model_name import served_name, small_files
from medusa_runtime.engine.serving.validation import accepts, most_characters
from medusa_runtime.errors import MedusaError
from medusa_runtime.models.fields import read_object

from ..disconnection import POLL_S
from ..faults import ApiError, ClientDisconnectedError, not_ready, stopping
from ..metrics import Metrics
from .adapters import Adapters
from .chat_template import ChatTemplate

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.engine.base import EngineInfo
    from medusa_runtime.engine.client import EngineClient
    from medusa_runtime.region.reader import Region
    from medusa_runtime.timeline import Timeline

logger = logging.getLogger(__name__)

_LONGEST_GUESS_S = 60.0
_INFO_POLL_S = 0.025
_SAMPLING_DEFAULTS = {  # in generation_config.json → in a request
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}
_FIRST_TOKEN_S = 2.0  # what ``finish_start`` does comes after the first token, or after this time


class ServedModel:
    """The served model. ``engine`` is None if the function runs the model itself, ``region`` if there is no model."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineClient | None,
        region: Region | None,
        timeline: Timeline,
        *,
        metrics: Metrics,
        draining: threading.Event,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.region = region
        self.metrics = metrics
        self.adapters = Adapters(settings, engine, timeline)
        self._timeline = timeline
        self._draining = draining
        self._chat_template: ChatTemplate | None = None
        self._sampling_defaults: Mapping[str, float] | None = None
        self.first_token = threading.Event()
        self._finishing = threading.Lock()  # held for ever by the first ``finish_start``

    @property
    def name(self) -> str:
        return served_name(self.settings, small_files(self.region))

    @property
    def ready(self) -> bool:
        """True if the engine answers, or the first request will start it."""
        return self.engine is None or self.engine.ready or self.settings.engine_start == "request"

    @property
    def engine_status(self) -> str:
        """The engine's state, as probes report it; empty where there is no engine."""
        if self.engine is None:
            return ""
        if self.engine.ready:
            return "ready"
        if not self.engine.started:
            return "idle"
        return "starting" if self.engine.info is None else "loading"

    def chat_template(self, is_disconnected: Callable[[], bool]) -> ChatTemplate:
        """Return the checkpoint's chat template. Waits for the small files, which the prefetcher fetches first."""
        if self._chat_template is None:
            assert self.region is not None
            self._wait_for_files(self.region, is_disconnected)
            self._chat_template = ChatTemplate(self.region.file, self.most_characters)
        return self._chat_template

    def most_characters(self) -> int | None:
        """Return how many characters a prompt may have; None if the engine has not described its model yet."""
        info = None if self.engine is None else self.engine.info
        return None if info is None else most_characters(info.max_model_len)

    def sampling_defaults(self, is_disconnected: Callable[[], bool]) -> Mapping[str, float]:
        """Return what generation_config.json has for the sampling fields that a request leaves out, as in vLLM.

        Values that no request may have are left out, and no more tokens are asked for than the context has. Waits for
        the small files like ``chat_template``.
        """
        if self._sampling_defaults is None:
            assert self.region is not None
            self._wait_for_files(self.region, is_disconnected)
            found = read_object(self.region.file, "generation_config.json") or {}
            defaults: dict[str, float] = {}
            for name, field in _SAMPLING_DEFAULTS.items():
                if not isinstance(value := found.get(name), int | float) or isinstance(value, bool):
                    continue
                if accepts(field, value):
                    defaults[field] = value
                else:
                    logger.warning("generation_config.json: %s is not used: no request may have %s", name, value)
            if "max_tokens" in defaults:
                most = self.wait_info(is_disconnected).max_model_len
                defaults["max_tokens"] = min(defaults["max_tokens"], most)
            self._sampling_defaults = defaults
        return self._sampling_defaults

    def finish_start(self) -> None:
        """Do in the background what no first request should wait for. Call once the engine is ready.

        The chat template is read, so that the log says at the start, and not at the first chat, if its files are
        broken; and unused adapters are fetched. Later calls do nothing.
        """
        if self._finishing.acquire(blocking=False):
            threading.Thread(target=self._finish_start, name="finish-start", daemon=True).start()

    def _finish_start(self) -> None:
        self.first_token.wait(_FIRST_TOKEN_S)
        try:
            self.chat_template(self._draining.is_set)
        except (MedusaError, ApiError) as error:
            logger.warning("chats cannot be answered: %s", error)
        except ClientDisconnectedError:
            return  # the instance is stopping
        self.adapters.warm()

    def _wait_for_files(self, region: Region, is_disconnected: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.settings.hold_s
        while True:
            try:
                region.wait_index(timeout_s=POLL_S)
                return
            except TimeoutError:
                pass
            if is_disconnected():
                raise ClientDisconnectedError
            if self._draining.is_set():
                raise stopping()
            if time.monotonic() > deadline:
                raise not_ready(f"the model's files were not there within {self.settings.hold_s:g} s of the request")

    def wait_info(self, is_disconnected: Callable[[], bool]) -> EngineInfo:
        """Wait until the engine describes its model, which it does before it has the weights. Start it if needed.

        Raises ClientDisconnectedError, EngineError, and 503 as ``check_hold``.
        """
        assert self.engine is not None
        check = self.wait_check(is_disconnected)
        if self.engine.info is None:
            self.engine.start()
        while (info := self.engine.info) is None:
            check()
            time.sleep(_INFO_POLL_S)
        return info

    def check_hold(self, began: float) -> None:
        """Raise 503 if a request that came at ``began`` has waited ``hold_s`` for the model, or would wait in vain.

        ``began`` is in seconds, as from ``time.monotonic``.
        """
        if self.engine is None or self.engine.ready:
            return
        if self._draining.is_set():
            raise stopping()
        if time.monotonic() - began > self.settings.hold_s:
            text = f"the model was not loaded within {self.settings.hold_s:g} s of the request"
            raise not_ready(text, self.eta_s())

    def wait_check(self, is_disconnected: Callable[[], bool]) -> Callable[[], None]:
        """Return a check for a new request that waits. It raises ClientDisconnectedError, or 503 as ``check_hold``."""
        began = time.monotonic()

        def check() -> None:
            if is_disconnected():
                raise ClientDisconnectedError
            self.check_hold(began)

        return check

    def eta_s(self) -> float:
        """Return after how many seconds a client that was refused should try again.

        While weights are fetched, that is the rest of the fetch at the present rate. After the fetch, nothing measures
        the progress, so the start is assumed to need as long again as it has taken, up to a minute.
        """
        fetch_s = 0.0 if self.region is None else self.region.progress().eta_s
        if fetch_s:
            return float(fetch_s)
        stages = self._timeline.stages()
        elapsed_s = (time.monotonic_ns() - stages[0].start_ns) / 1e9 if stages else 1.0
        return min(elapsed_s, _LONGEST_GUESS_S)
