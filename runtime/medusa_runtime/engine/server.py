"""The engine's end of the socket: it reads requests from every connection and writes their deltas back."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from ..errors import EngineError, MedusaError, OverloadedError, RequestError
from ..process import hang_up
from ..process_limits import as_limit_error
from ..region.fd_passing import region_from_descriptors
from . import frames
from .base import Delta, Engine, GenerateRequest

logger = logging.getLogger(__name__)

_LONG = 1 << 16  # characters or token ids; handling more takes tens of milliseconds, so it gets a thread of its own
_METHODS = ("stats", "tokenize", "detokenize", "embed", "wait_adapter", "drop_adapter")
# These wait for forwards or bytes, so they must not hold up the connection, and are given an event that cancels them.
_CANCELLABLE = ("embed", "wait_adapter")
_RETRY_S = 0.1  # between attempts to accept a connection while the process has no free descriptor
# Of one engine. Its client may be a stranger, and a node agent's engine takes process ids of the agent's container.
_MOST_CONNECTIONS, _MOST_CALLS = 1024, 1024
_ADAPTER_FILES = 2  # descriptors of an adapter: its region, and its weights' file if that is local


def _is_slow_to_add(request: GenerateRequest) -> bool:
    """Return whether adding a request is slow, so that others should not wait: it is long, or has a grammar."""
    params = request.params
    return params.structured_outputs is not None or any(
        map(_is_long, (request.prompt, params.allowed_token_ids, params.logit_bias))
    )


def _is_long(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict) and len(value) > _LONG


class _CallThreads:
    """The threads of slow calls, of which one engine has at most _MOST_CALLS."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(_MOST_CALLS)

    def start(self, name: str, target: Callable[..., None], argument: Any) -> None:
        """Run ``target(argument)`` in a thread of this name. Raises OverloadedError, and RuntimeError like a thread."""
        if not self._free.acquire(blocking=False):
            raise OverloadedError(f"the engine works on {_MOST_CALLS} slow calls already; try again later")

        def run() -> None:
            try:
                target(argument)
            finally:
                self._free.release()

        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except BaseException:
            self._free.release()
            raise


def _error_frame(request_id: Any, error: MedusaError) -> frames.Frame:
    return {
        "type": "error",
        "id": request_id,
        "code": error.code,
        "message": str(error),
        "param": error.param if isinstance(error, RequestError) else None,
        "retry_after_s": error.retry_after_s if isinstance(error, OverloadedError) else None,
    }


def _pack(frame: frames.Frame) -> bytes:
    """Encode a frame. One that is too large becomes an error frame, since the client would drop the connection."""
    try:
        return frames.pack(frame)
    except RequestError as error:
        return frames.pack(_error_frame(frame.get("id", ""), error))


class EngineServer:
    """Serves one engine over any number of connections, from ``start`` until ``close``."""

    def __init__(self, listener: socket.socket, engine: Engine) -> None:
        self._listener = listener
        self._engine = engine
        self._connections: set[_Connection] = set()
        self._call_threads = _CallThreads()
        self._lock = threading.Lock()
        self._ready = False

    def start(self) -> None:
        threading.Thread(target=self._accept, name="engine-accept", daemon=True).start()

    def announce_ready(self) -> None:
        """Tell all present and future clients that the weights are applied."""
        with self._lock:
            self._ready = True
            for connection in self._connections:
                connection.send({"type": "ready"})

    def close(self) -> None:
        with self._lock:
            for connection in tuple(self._connections):
                connection.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                limit = as_limit_error(error)
                if limit is None:
                    return  # the listener was closed
                logger.warning("an engine connection waits: %s", limit)
                time.sleep(_RETRY_S)
                continue
            if len(self._connections) >= _MOST_CONNECTIONS:
                logger.warning("an engine connection is closed: there are %d already", _MOST_CONNECTIONS)
                accepted.close()
                time.sleep(_RETRY_S)
                continue
            connection = _Connection(accepted, self._engine, self._call_threads, self._forget)
            with self._lock:
                self._connections.add(connection)
                connection.send({"type": "hello", "info": self._engine.info._asdict()})
                if self._ready:
                    connection.send({"type": "ready"})
            try:
                connection.start()
            except RuntimeError as error:  # there is no room for a thread, now; the next client may find some
                logger.warning("an engine connection is closed: %s", as_limit_error(error) or error)
                self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


class _Connection:
    """One client's connection. One thread reads and another writes, so a slow client never holds up the engine."""

    def __init__(
        self,
        connection: socket.socket,
        engine: Engine,
        call_threads: _CallThreads,
        on_close: Callable[[_Connection], None],
    ) -> None:
        self._socket = connection
        self._engine = engine
        self._slow_calls: Collection[str] = getattr(engine, "slow_calls", ())
        self._call_threads = call_threads
        self._on_close = on_close
        self._outgoing: queue.SimpleQueue[frames.Frame | None] = queue.SimpleQueue()
        self._running: set[str] = set()
        # The deltas of requests behind the first one, whose texts are being made.
        self._held: dict[str, list[Delta]] = {}
        self._held_lock = threading.Lock()
        self._calls: dict[str, threading.Event] = {}  # unfinished calls that can be cancelled
        # Gets the socket once the last frame has left.
        self._http_handoff: Callable[[socket.socket], None] | None = None

    def start(self) -> None:
        """Begin to read and write. Raises RuntimeError if a thread cannot be made; the connection is then closed."""
        try:
            threading.Thread(target=self._write, name="engine-write", daemon=True).start()
        except RuntimeError:
            self._end(False)
            raise
        try:
            threading.Thread(target=self._read, name="engine-read", daemon=True).start()
        except RuntimeError:
            self.close()
            raise

    def send(self, frame: frames.Frame) -> None:
        self._outgoing.put(frame)

    def close(self) -> None:
        self._outgoing.put(None)

    def _sink(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._running.discard(delta.request_id)
        if delta.prompt_logprobs is not None and hasattr(self._engine, "with_texts"):
            self._hold(delta)
        elif not self._held or not self._is_held(delta):
            self.send(frames.delta_to_frame(delta))

    def _hold(self, delta: Delta) -> None:
        """Have another thread send a delta with a prompt's log-probabilities, because to make their texts is slow.

        The request's later deltas wait for it.
        """
        with self._held_lock:
            self._held[delta.request_id] = []
        try:
            self._call_threads.start("engine-texts", self._send_with_texts, delta)
        except (MedusaError, RuntimeError) as error:
            self._drop_held(delta, error)

    def _is_held(self, delta: Delta) -> bool:
        """Return whether a delta has been put behind another one that waits."""
        with self._held_lock:
            held = self._held.get(delta.request_id)
            if held is not None:
                held.append(delta)
            return held is not None

    def _send_with_texts(self, delta: Delta) -> None:
        try:
            found = self._engine.with_texts(delta.prompt_logprobs)  # type: ignore[attr-defined]
            first = frames.delta_to_frame(delta._replace(prompt_logprobs=found))
        except Exception as error:  # noqa: BLE001 - without an answer the caller would wait forever
            self._drop_held(delta, error)
            return
        with self._held_lock:
            self.send(first)
            for following in self._held.pop(delta.request_id, ()):
                self.send(frames.delta_to_frame(following))

    def _drop_held(self, delta: Delta, error: Exception) -> None:
        """Answer a request with an error in place of its deltas."""
        if not isinstance(error, MedusaError):
            logger.error("the texts of a prompt's tokens could not be made", exc_info=error)
            limit = as_limit_error(error)
            error = limit or EngineError(f"the texts of the prompt's tokens could not be made: {error}")
        with self._held_lock:
            self._held.pop(delta.request_id, None)
            self._send_error(delta.request_id, error)
        self._engine.cancel(delta.request_id)

    def _read(self) -> None:
        reader = frames.FrameReader(self._socket, most_descriptors=_ADAPTER_FILES)
        try:
            while (frame := reader.read()) is not None:
                if frame["type"] == "adapter":
                    self._add_adapter(frame, reader.descriptors())
                elif frame["type"] != "http":
                    self._handle(frame)
                elif self._switch_to_http():
                    return
        except OSError:
            pass  # the connection broke, or this side has closed it
        except MedusaError as error:
            logger.error("engine connection dropped: %s", error)  # noqa: TRY400
        except Exception:
            logger.exception("engine connection dropped")
        finally:
            reader.close()
            running = tuple(self._running)
            self._running.clear()
            for request_id in running:
                self._engine.cancel(request_id)
            for cancelled in tuple(self._calls.values()):
                cancelled.set()
            self.close()
            self._on_close(self)

    def _handle(self, frame: frames.Frame) -> None:
        kind, request_id = frame["type"], frame.get("id", "")
        try:
            if kind == "generate":
                request = frames.request_from_frame(frame)
                self._running.add(request.id)
                if _is_slow_to_add(request):
                    self._call_threads.start("engine-add", self._add_in_thread, request)
                else:
                    self._engine.add(request, self._sink)
            elif kind == "cancel":
                if (cancelled := self._calls.get(frame["id"])) is not None:
                    cancelled.set()
                else:
                    self._running.discard(frame["id"])
                    self._engine.cancel(frame["id"])
            elif kind == "call" and frame["method"] in _METHODS:
                if frame["method"] in _CANCELLABLE:
                    cancelled = self._calls[request_id] = threading.Event()
                    frame["arguments"]["cancelled"] = cancelled
                    try:
                        self._call_threads.start("engine-call", self._call, frame)
                    except BaseException:
                        self._calls.pop(request_id, None)
                        raise
                elif frame["method"] in self._slow_calls or any(map(_is_long, frame["arguments"].values())):
                    self._call_threads.start("engine-call", self._call, frame)
                else:
                    self._call(frame)
            else:
                raise RequestError(f"the engine knows no frame {kind!r}")  # noqa: TRY301 answered below
        except MedusaError as error:
            self._send_error(request_id, error)
        except Exception as error:  # the other requests on this connection go on
            if limit := as_limit_error(error):
                self._send_error(request_id, limit)
                return
            if not isinstance(error, frames.UNREADABLE):
                logger.exception("a %r frame could not be handled", kind)
            self._send_error(request_id, RequestError(f"a {kind!r} frame could not be read: {error}"))

    def _add_adapter(self, frame: frames.Frame, descriptors: list[int]) -> None:
        """Give an adapter's region to the engine. If it cannot be used, requests that name the adapter get an error."""
        try:
            name = frame.get("name")
            if not isinstance(name, str) or not descriptors or not hasattr(self._engine, "add_adapter"):
                raise RequestError("expected the name of an adapter, its region, and an engine that takes adapters")
            region = region_from_descriptors(descriptors)
            descriptors = []
            self._engine.add_adapter(name, region)
        except MedusaError as error:
            logger.warning("an adapter was refused: %s", error)
        finally:
            frames.close_all(descriptors)

    def _switch_to_http(self) -> bool:
        """Wait for the engine's own HTTP server, and hand this connection to it.

        Returns False, after sending the error, if the engine has no such server or it failed.
        """
        try:
            if not hasattr(self._engine, "open_http"):
                raise RequestError(f"the {self._engine.info.engine} engine has no HTTP server of its own")
            handoff = self._engine.open_http()
        except MedusaError as error:
            self._send_error("", error)
            return False
        self._on_close(self)  # from here on the server sends nothing more over it
        self._http_handoff = handoff
        self.send({"type": "http"})
        return True

    def _call(self, frame: frames.Frame) -> None:
        method, request_id = frame["method"], frame.get("id", "")
        try:
            if not hasattr(self._engine, method):
                raise self._unsupported(method, frame["arguments"])  # noqa: TRY301 answered below
            value = getattr(self._engine, method)(**frame["arguments"])
            self.send({"type": "result", "id": request_id, "value": value})
        except MedusaError as error:
            self._send_error(request_id, error)
        except Exception as error:  # without an answer the caller would wait forever
            if not isinstance(error, frames.UNREADABLE):
                logger.exception("a call of %s failed", method)
            limit = as_limit_error(error)
            self._send_error(request_id, limit or RequestError(f"a call of {method} could not be read: {error}"))
        finally:
            self._calls.pop(request_id, None)

    def _unsupported(self, method: str, arguments: dict[str, Any]) -> RequestError:
        if method.endswith("_adapter"):
            return RequestError("adapters need a model that continues text, and --engine torch", "model")
        wanted = "embeddings and scores expected an encoder such as BERT"
        if arguments.get("classify"):
            wanted = "/classify expected a sequence classifier"
        return RequestError(
            f"the {self._engine.info.engine} engine continues text; for {wanted} as --model, with --engine torch"
        )

    def _add_in_thread(self, request: GenerateRequest) -> None:
        try:
            self._engine.add(request, self._sink)
        except MedusaError as error:
            self._send_error(request.id, error)
        except Exception as error:
            logger.exception("a request could not be added")
            limit = as_limit_error(error)
            self._send_error(request.id, limit or RequestError(f"the request could not be read: {error}"))
        else:
            if request.id not in self._running:  # cancelled before the engine knew it
                self._engine.cancel(request.id)

    def _send_error(self, request_id: Any, error: MedusaError) -> None:
        self._running.discard(request_id)
        self.send(_error_frame(request_id, error))

    def _write(self) -> None:
        complete = False
        try:
            while (frame := self._outgoing.get()) is not None:
                pieces = [_pack(frame)]
                last = False
                # Everything that one engine step produced is sent in one system call.
                while not last and not self._outgoing.empty():
                    following = self._outgoing.get()
                    if following is None:
                        last = True
                    else:
                        pieces.append(_pack(following))
                self._socket.sendall(b"".join(pieces))
                if last:
                    break
            complete = True
        except OSError:
            pass  # the reader notices the lost client and cancels its requests
        finally:
            self._end(complete)

    def _end(self, complete: bool) -> None:
        if complete and self._http_handoff is not None:
            self._http_handoff(self._socket)
            return
        hang_up(self._socket)
        self._socket.close()
