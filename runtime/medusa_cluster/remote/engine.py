"""An engine whose tokens come from a model of the cluster. Like every engine, it runs in the engine process."""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.engine import frames
from medusa_runtime.engine.base import Delta, EngineInfo, GenerateRequest
from medusa_runtime.errors import EngineError, MedusaError, OverloadedError, RequestError, UnreachableError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .files import INFO
from .gateways import Exchange, Gateways, error_of

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 2  # for a request that has no token yet
_DONE = b"[DONE]"

Sink = Callable[[Delta], None]


def preimport(settings: Settings, _region: Region | None = None) -> None:
    """Do nothing: importing this module has imported everything that is needed."""


class ClusterEngine:
    """An engine that passes requests on to a gateway, and their deltas back. Each request has a thread."""

    def __init__(self, region: Region, settings: Settings, timeline: Timeline) -> None:
        """Wait for the model's description. Raises the error with which fetching it ended."""
        region.wait_index()
        text = region.file(INFO)
        assert text is not None
        self.info: EngineInfo = frames.info_from_frame({"info": json.loads(text)})
        self._model = settings.model
        self._most = settings.max_concurrency + settings.max_waiting
        self._gateways = Gateways.of(settings)
        self._timeline = timeline
        self._lock = threading.Lock()
        self._running: dict[str, _RunningRequest] = {}
        self._generated_tokens = 0
        self._prompt_tokens = 0
        self._first = True

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        """Begin a request. Raises OverloadedError, and RequestError for a duplicate id. Later errors end the deltas."""
        running = _RunningRequest(request, sink)
        with self._lock:
            if len(self._running) >= self._most:
                raise OverloadedError(f"{len(self._running)} requests are running, as many as may; try again later")
            if request.id in self._running:
                raise RequestError(f"id: expected one that no running request has, found {request.id!r}")
            self._running[request.id] = running
        threading.Thread(target=self._run, args=(running,), name="cluster-request", daemon=True).start()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            running = self._running.pop(request_id, None)
        if running is not None:
            running.cancel()
            running.deliver(_final_delta(request_id, "cancelled"))

    def run(self, stop: threading.Event) -> None:
        stop.wait()

    def wait_ready(self) -> None:
        """Return at once, because the gateway holds requests while the model starts."""

    def tokenize(self, text: str, add_special_tokens: bool, **cut: Any) -> list[int]:
        return list(self._call("tokenize", {"text": text, "add_special_tokens": add_special_tokens, **cut}))

    def detokenize(self, token_ids: list[int]) -> str:
        return str(self._call("detokenize", {"token_ids": token_ids}))

    def embed(
        self, inputs: list[str | list[int]], cancelled: threading.Event | None = None, **options: Any
    ) -> list[list[Any]]:
        """Have the gateway call its engine's ``embed`` with the same ``options``, those of EmbedOptions."""
        return list(self._call("embed", {"inputs": inputs, **options}, cancelled))

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {
                "running": len(self._running),
                "waiting": 0,
                "kv_tokens_used": 0,
                "prompt_tokens_total": self._prompt_tokens,
                "generated_tokens_total": self._generated_tokens,
            }

    def close(self) -> None:
        with self._lock:
            running, self._running = list(self._running.values()), {}
        for one in running:
            one.cancel()
            one.deliver(_final_delta(one.request.id, "error", EngineError("the engine is stopping; try again")))

    def _call(self, method: str, arguments: dict[str, Any], cancelled: threading.Event | None = None) -> Any:
        body = {"model": self._model, "method": method, "arguments": arguments}
        return self._gateways.ask("/medusa/call", body, cancelled)["value"]

    def _run(self, running: _RunningRequest) -> None:
        """Run a request to its end. Runs in the request's own thread."""
        attempts = 0
        while True:
            attempts += 1
            try:
                self._stream(running)
                break
            except (OSError, http.client.HTTPException, UnreachableError) as error:
                if running.begun or attempts == _MOST_ATTEMPTS or running.cancelled:
                    self._end(running, UnreachableError(f"the gateway's answer broke off ({error})"))
                    break
            except MedusaError as error:
                self._end(running, error)
                break
            except Exception as error:
                logger.exception("request %s failed", running.request.id)
                self._end(running, EngineError(f"the cluster's answer cannot be used: {error}"))
                break

    def _stream(self, running: _RunningRequest) -> None:
        frame = frames.request_to_frame(running.request)
        exchange = self._gateways.post("/medusa/generate", {"model": self._model, "frame": frame})
        running.attach(exchange)
        try:
            for line in exchange.begin():
                data = line.removeprefix(b"data: ").strip()
                if not line.startswith(b"data: "):
                    continue
                if data == _DONE and running.ended:
                    return
                value = json.loads(data)
                if "error" in value:
                    raise error_of(value)
                self._deliver(running, frames.delta_from_frame(value))
            raise http.client.IncompleteRead(b"")
        finally:
            exchange.close()

    def _deliver(self, running: _RunningRequest, delta: Delta) -> None:
        running.begun = True
        with self._lock:
            self._generated_tokens += len(delta.token_ids)
            first, self._first = self._first, False
            if delta.finish_reason is not None:
                running.ended = True
                self._prompt_tokens += delta.prompt_tokens
                if self._running.pop(running.request.id, None) is None:
                    return  # cancelled
        if first:
            self._timeline.mark("first_token")
        running.deliver(delta)

    def _end(self, running: _RunningRequest, error: MedusaError) -> None:
        with self._lock:
            if self._running.pop(running.request.id, None) is None:
                return
        running.deliver(_final_delta(running.request.id, "error", error))


class _RunningRequest:
    """A request under way."""

    def __init__(self, request: GenerateRequest, sink: Sink) -> None:
        self.request = request
        self.begun = False
        self.ended = False
        self.cancelled = False
        self._sink = sink
        self._exchange: Exchange | None = None
        self._lock = threading.Lock()

    def attach(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchange = exchange
            cancelled = self.cancelled
        if cancelled:
            exchange.abort()

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            exchange = self._exchange
        if exchange is not None:
            exchange.abort()

    def deliver(self, delta: Delta) -> None:
        try:
            self._sink(delta)
        except Exception:
            logger.exception("the sink of request %s failed", self.request.id)


def _final_delta(request_id: str, reason: str, error: MedusaError | None = None) -> Delta:
    return Delta(request_id, "", finish_reason=reason, error=None if error is None else (error.code, str(error)))
