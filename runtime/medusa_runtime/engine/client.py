"""The function process's end of the engine socket. It imports nothing heavy: the process answers probes from t=0."""

from __future__ import annotations

import base64
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import EngineError, MedusaError, RequestError, from_code
from ..process import hang_up
from . import frames
from .base import Delta, Embedding, EmbedOptions, EngineInfo, GenerateRequest

logger = logging.getLogger(__name__)

_CHECK_EVERY_S, _LONG_S = 0.25, 3600.0
_CLOSED = "the engine client is closed"
_MOST_ATTEMPTS = 2  # no third engine gets a request that may have killed the first two


class TokenStream:
    """The deltas of one request. Iterate over it, or call ``get`` with a timeout. ``close`` cancels the request."""

    def __init__(self, client: EngineClient, request: GenerateRequest) -> None:
        self.request = request
        self.attempts = 0
        self.last_connection: socket.socket | None = None  # the connection it was last sent over
        self.started = False
        self.incoming: queue.SimpleQueue[Delta | MedusaError] = queue.SimpleQueue()
        self._client = client
        self._finished = False

    def get(self, timeout_s: float | None = None) -> Delta | None:
        """Return the next delta, or None after ``timeout_s``. Raises RequestError, OverloadedError, EngineError."""
        try:
            item = self.incoming.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, MedusaError):
            self._finished = True
            raise item
        if item.finish_reason is not None:
            self._finished = True
            if item.error is not None:
                raise from_code(*item.error)
        return item

    def __iter__(self) -> Iterator[Delta]:
        while not self._finished:
            delta = self.get()
            if delta is not None:
                yield delta

    def close(self) -> None:
        """Cancel the request unless it has finished. May be called twice."""
        if not self._finished:
            self._finished = True
            self._client.cancel(self.request.id)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineClient:
    """A client of the engine process that serves the socket at ``path``. It reconnects when the engine has crashed.

    It opens nothing before the first use or ``start``, so it can be made before a fork.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.info: EngineInfo | None = None
        self.on_change: Callable[[], None] = lambda: None  # called when ``started``, ``info`` or ``ready`` changes
        self._state = threading.Condition()
        self._ready = False
        self._failure: MedusaError | None = None
        self._socket: socket.socket | None = None
        self._streams: dict[str, TokenStream] = {}
        self._calls: dict[str, queue.SimpleQueue[Any]] = {}
        self._adapters: dict[str, list[int]] = {}  # name → descriptors, kept for the engine that follows a crash
        self._adapters_lock = threading.Lock()  # also held while descriptors are sent, so that nobody closes them then
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._send_lock = threading.Lock()
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether the engine is up and all weights are applied."""
        return self._ready

    @property
    def started(self) -> bool:
        """Whether anything has used the engine so far."""
        return self._thread is not None

    def start(self) -> None:
        """Connect in the background. Methods that need the engine call this themselves."""
        with self._state:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name="engine-client", daemon=True)
                self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        """Block until the weights are applied. Raises EngineError after ``timeout_s``, and the engine's failure."""
        self.start()
        with self._state:
            if not self._state.wait_for(lambda: self._ready or self._failure or self._closed, timeout_s):
                raise EngineError(f"the engine was not ready within {timeout_s} s")
            if self._failure:
                raise self._failure
            if self._closed:
                raise EngineError(_CLOSED)
            assert self.info is not None
            return self.info

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Send a request, and return the stream of its deltas.

        A request that is sent before the engine is up waits for it. The stream raises the request's errors; this method
        itself raises EngineError for an id that is in use and after ``close``, and the error given to ``fail``.
        """
        self.start()
        stream = TokenStream(self, request)
        with self._state:
            if self._failure:
                raise self._failure
            if self._closed:
                raise EngineError(_CLOSED)
            if request.id in self._streams:
                raise EngineError(f"a request with the id {request.id!r} is running already")
            self._streams[request.id] = stream
            connection = self._socket
        if connection is not None:
            self._submit(connection, stream)
        return stream

    def cancel(self, request_id: str) -> None:
        with self._state:
            self._streams.pop(request_id, None)
            connection = self._socket
        if connection is not None:
            self._send(connection, {"type": "cancel", "id": request_id})

    def stats(self) -> dict[str, Any]:
        """Return the engine's numbers for /metrics; empty while there is no engine."""
        if self.info is None:
            return {}
        return dict(self._call("stats", timeout_s=2.0))

    def tokenize(
        self, text: str, add_special_tokens: bool = True, *, most: int | None = None, left: bool = False
    ) -> list[int]:
        """Return a text's token ids, at most ``most`` of them: the first ones, or the last ones with ``left``."""
        cut: dict[str, Any] = {} if most is None else {"most": most, "left": left}
        return list(self._call("tokenize", text=text, add_special_tokens=add_special_tokens, **cut))

    def detokenize(self, token_ids: list[int]) -> str:
        return str(self._call("detokenize", token_ids=token_ids))

    def embed(
        self,
        inputs: Sequence[str | Sequence[int] | Sequence[str]],
        options: EmbedOptions | None = None,
        *,
        wait_check: Callable[[], None] | None = None,
    ) -> list[Embedding]:
        """Return a vector for each text (see ``EncoderEngine.embed``). Before the weights are there, this waits.

        ``wait_check`` is called a few times a second during the wait; an exception from it ends the wait. Raises
        RequestError and EngineError.
        """
        named = (options or EmbedOptions())._asdict()
        found = self._call("embed", timeout_s=None, wait_check=wait_check, inputs=inputs, **named)
        return [Embedding(tokens, base64.b64decode(data)) for tokens, data in found]

    def add_adapter(self, name: str, descriptors: list[int]) -> None:
        """Give an adapter to this socket's engine, and to every later one. Takes over the descriptors.

        ``region.fd_passing`` says what the descriptors are. Requests that are sent from now on may name the adapter. If
        it cannot be used, these requests and ``wait_adapter`` get the error.
        """
        self.start()
        with self._adapters_lock:
            with self._state:
                if self._closed:
                    frames.close_all(descriptors)
                    return
                frames.close_all(self._adapters.get(name, ()))
                self._adapters[name] = descriptors
                connection = self._socket
            if connection is not None:
                self._send(connection, {"type": "adapter", "name": name}, descriptors)

    def wait_adapter(self, name: str, wait_check: Callable[[], None] | None = None) -> dict[str, Any]:
        """Wait until the engine has loaded an adapter, and return its numbers of layers and bytes.

        Raises the error if the adapter cannot be used, and what ``wait_check`` raises.
        """
        return dict(self._call("wait_adapter", timeout_s=None, wait_check=wait_check, name=name))

    def drop_adapter(self, name: str) -> None:
        """Remove an adapter from the engine. Requests that use it go on."""
        with self._adapters_lock:
            with self._state:
                frames.close_all(self._adapters.pop(name, ()))
                connection = self._socket
            if connection is not None:
                frame = {"type": "call", "id": "", "method": "drop_adapter", "arguments": {"name": name}}
                self._send(connection, frame)

    def connect_http(self, wait_check: Callable[[], None]) -> socket.socket:
        """Connect to the engine's own HTTP server. Waits until it is up, calling ``wait_check`` a few times a second.

        Raises RequestError if the engine has no such server, EngineError if the engine ends during the wait, and what
        ``wait_check`` raises.
        """
        from .http_connection import connect_http

        self.start()

        def check() -> None:
            with self._state:
                if self._failure:
                    raise self._failure
            wait_check()

        return connect_http(self.path, check)

    def fail(self, error: MedusaError) -> None:
        """Answer every waiting and future request with this error, because no engine will ever come."""
        with self._state:
            self._failure = error
            streams, self._streams = list(self._streams.values()), {}
            self._state.notify_all()
        for stream in streams:
            stream.incoming.put(error)

    def close(self) -> None:
        """Disconnect, and end all requests with an error."""
        with self._adapters_lock, self._state:
            self._closed = True
            connection, self._socket = self._socket, None
            streams, self._streams = list(self._streams.values()), {}
            for descriptors in self._adapters.values():
                frames.close_all(descriptors)
            self._adapters.clear()
            self._state.notify_all()
        for stream in streams:
            stream.incoming.put(EngineError(_CLOSED))
        if connection is not None:
            hang_up(connection)

    def _call(
        self,
        method: str,
        timeout_s: float | None = 30.0,
        wait_check: Callable[[], None] | None = None,
        **arguments: Any,
    ) -> Any:
        self.start()
        call_id = f"call-{next(self._numbers)}"
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        wait = _Wait(timeout_s, wait_check)
        with self._state:
            while not (self._socket or self._failure or self._closed) and (left_s := wait.next_s()) is not None:
                self._state.wait(left_s)
            if self._failure:
                raise self._failure
            connection = self._socket
            if connection is None:
                raise EngineError("there is no engine to ask")
            self._calls[call_id] = answer
        try:
            self._send(connection, {"type": "call", "id": call_id, "method": method, "arguments": arguments})
            value = None
            while value is None and (left_s := wait.next_s()) is not None:
                try:
                    value = answer.get(timeout=left_s)
                except queue.Empty:
                    continue
            if value is None:
                raise EngineError(f"the engine did not answer {method!r} within {timeout_s} s")  # noqa: TRY301
        except BaseException:  # nobody waits for the answer any more
            self._send(connection, {"type": "cancel", "id": call_id})
            raise
        finally:
            with self._state:
                self._calls.pop(call_id, None)
        if isinstance(value, MedusaError):
            raise value
        return value

    def _serve(self) -> None:
        """Connect, read until the engine goes away, end the requests lost with it, and start over."""
        self.on_change()
        while not self._closed:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.path)
            except OSError:
                connection.close()
                if not os.path.exists(self.path):
                    self.fail(EngineError("the engine's socket is gone: the instance is shutting down"))
                    return
                time.sleep(0.05)
                continue
            with self._adapters_lock, self._state:
                if self._closed:
                    connection.close()
                    return
                self._socket = connection
                waiting = list(self._streams.values())
                for name, descriptors in self._adapters.items():
                    self._send(connection, {"type": "adapter", "name": name}, descriptors)
                self._state.notify_all()
            for stream in waiting:
                self._submit(connection, stream)
            try:
                self._read(connection)
            except (OSError, MedusaError):
                logger.exception("the engine connection broke")
            self._on_disconnect(connection)

    def _read(self, connection: socket.socket) -> None:
        reader = frames.FrameReader(connection)
        while (frame := reader.read()) is not None:
            kind = frame["type"]
            if kind == "delta":
                self._deliver(frames.delta_from_frame(frame))
            elif kind == "hello":
                info = frames.info_from_frame(frame)
                with self._state:
                    self.info = info
                    self._state.notify_all()
                self.on_change()
            elif kind == "ready":
                with self._state:
                    self._ready = True
                    self._state.notify_all()
                self.on_change()
            elif kind in ("result", "error"):
                self._deliver_answer(frame)

    def _deliver(self, delta: Delta) -> None:
        with self._state:
            stream = self._streams.get(delta.request_id)
            if stream is not None and delta.finish_reason is not None:
                del self._streams[delta.request_id]
        if stream is not None:
            stream.started = True
            stream.incoming.put(delta)

    def _deliver_answer(self, frame: frames.Frame) -> None:
        value, name = frames.answer_from_frame(frame), frame.get("id", "")
        with self._state:
            stream = self._streams.pop(name, None)
            call = self._calls.get(name)
        if stream is not None and not isinstance(value, MedusaError):
            value = EngineError("the engine answered a request with the result of a call")
        if stream is not None:
            stream.incoming.put(value)
        elif call is not None:
            call.put(value)

    def _on_disconnect(self, connection: socket.socket) -> None:
        """Handle an engine's end: requests it had not started go to the next engine, the others get an error."""
        connection.close()
        error = EngineError(
            "the engine process ended while it worked on this request; it is being restarted, try again"
        )
        with self._state:
            self._socket = None
            self.info = None
            self._ready = False
            lost = [s for s in self._streams.values() if s.started or s.attempts >= _MOST_ATTEMPTS]
            for stream in lost:
                del self._streams[stream.request.id]
            calls = list(self._calls.values())
        self.on_change()
        for stream in lost:
            stream.incoming.put(error)
        for call in calls:
            call.put(error)

    def _submit(self, connection: socket.socket, stream: TokenStream) -> None:
        with self._send_lock:
            if self._socket is not connection or stream.last_connection is connection:
                return
            stream.last_connection = connection
            stream.attempts += 1
        try:
            self._send(connection, frames.request_to_frame(stream.request))
        except RequestError as error:
            with self._state:
                self._streams.pop(stream.request.id, None)
            stream.incoming.put(error)

    def _send(self, connection: socket.socket, frame: frames.Frame, descriptors: Sequence[int] = ()) -> None:
        data = frames.pack(frame)
        try:
            with self._send_lock:
                sent = socket.send_fds(connection, [data], descriptors) if descriptors else 0
                connection.sendall(data[sent:])
        except OSError:
            pass  # the reading thread notices the broken connection too, and handles every waiting stream


class _Wait:
    """A wait that is cut into slices, so that ``wait_check`` can be called between them."""

    def __init__(self, timeout_s: float | None, wait_check: Callable[[], None] | None) -> None:
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._wait_check = wait_check

    def next_s(self) -> float | None:
        """Call ``wait_check``, and return the seconds to wait before the next call; None once time is up."""
        if self._wait_check is not None:
            self._wait_check()
        left_s = _LONG_S if self._deadline is None else self._deadline - time.monotonic()
        if left_s <= 0:
            return None
        return left_s if self._wait_check is None else min(_CHECK_EVERY_S, left_s)
