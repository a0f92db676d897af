"""The token streams of one API request. They wait while the model loads, and end when the client leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from medusa_runtime.engine.base import Delta, GenerateRequest
from medusa_runtime.errors import ContextLengthError

from ..disconnection import POLL_S
from ..faults import ClientDisconnectedError
from ..merge import Item, Merge

if TYPE_CHECKING:
    from medusa_runtime.engine.client import TokenStream

    from .adapters import AdapterLease
    from .served_model import ServedModel


class Generation:
    """The token streams of one API request, read with ``events``. Leaving it as a context cancels what still runs."""

    def __init__(
        self, model: ServedModel, requests: Sequence[GenerateRequest], is_disconnected: Callable[[], bool]
    ) -> None:
        """Start the requests, which all have the same adapter, or none. Wait until the engine has been given it."""
        assert model.engine is not None
        self._model = model
        self._is_disconnected = is_disconnected
        self._began = time.monotonic()
        self._first: dict[int, float] = {}
        self._tokens = [0] * len(requests)
        self._unfinished = set(range(len(requests)))
        self._streams: list[TokenStream] = []
        self._merge: Merge[Delta] | None = None
        self._closed = False
        self._lease: AdapterLease | None = None
        try:
            if requests and requests[0].adapter is not None:
                self._lease = model.adapters.acquire(requests[0].adapter, model.wait_check(is_disconnected))
            most = model.most_characters()
            for request in requests:
                _check_length(request.prompt, most)
                self._streams.append(model.engine.generate(request))
            if len(self._streams) > 1:  # it starts threads, which may fail
                self._merge = Merge([self._read(stream) for stream in self._streams])
        except BaseException:
            self.close()
            raise

    def events(self, heartbeat_s: float | None = None) -> Iterator[Item[Delta] | None]:
        """Yield the deltas with the number of their request, and None after each ``heartbeat_s`` of silence.

        Raises ClientDisconnectedError, RequestError, OverloadedError, EngineError, and ApiError 503 after ``hold_s``.
        """
        last = checked_at = time.monotonic()
        while self._unfinished:
            item = self._next()
            now = time.monotonic()
            if now - checked_at >= POLL_S:
                checked_at = now
                if self._is_disconnected():
                    raise ClientDisconnectedError
            if item is not None:
                self._note(item, now)
                last = now
                yield item
                continue
            if not self._first:
                self._model.check_hold(self._began)
            if heartbeat_s is not None and now - last >= heartbeat_s:
                last = now
                yield None

    def _next(self) -> Item[Delta] | None:
        if self._merge is not None:
            return self._merge.get(POLL_S)
        delta = self._streams[0].get(POLL_S)
        return None if delta is None else Item(0, delta)

    def _read(self, stream: TokenStream) -> Iterator[Delta]:
        while not self._closed:  # a closed stream stays silent, so return to this check now and then
            delta = stream.get(POLL_S)
            if delta is not None:
                yield delta
                if delta.finish_reason is not None:
                    return

    def _note(self, item: Item[Delta], now: float) -> None:
        delta = item.value
        self._first.setdefault(item.source, now)
        self._model.first_token.set()
        self._tokens[item.source] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._unfinished.discard(item.source)
            first_s = self._first[item.source] - self._began
            self._model.metrics.generated(first_s, now - self._began, self._tokens[item.source])

    def close(self) -> None:
        self._closed = True
        for stream in self._streams:
            stream.close()
        if self._merge is not None:
            self._merge.close()
        if self._lease is not None:
            self._lease.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_length(prompt: str | Sequence[int], most: int | None) -> None:
    """Raise ContextLengthError for a text that the engine would refuse: to send it takes five times its memory."""
    if most is not None and isinstance(prompt, str) and len(prompt) > most:
        raise ContextLengthError(
            f"expected a prompt of at most {most} characters, which is more than this model's context can hold, found "
            f"{len(prompt)}",
            "prompt",
        )
