"""Sends the requests of a batch to its instance, as many at a time as it computes, and writes their results."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import TYPE_CHECKING

from medusa_runtime.errors import MedusaError
from medusa_runtime.process import hang_up

from . import lines
from .feed import Feed
from .lines import BadLineError, BatchRequest

if TYPE_CHECKING:
    from ...bench.served_instance import ServedInstance
    from .custom_ids import CustomIds
    from .sink import Sink
    from .source import Source

_TRIES = 3
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 5.0
# An instance that answers so has not begun the request, or has to wait for other answers to be sent.
_FULL = ("overloaded", "not_ready", "body_memory", "answer_memory")
_LONGEST_ANSWER_S = 7 * 24 * 3600.0


class Counts:
    """How many requests have been answered, have failed, and were skipped since their results were there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answered = self.failed = self.skipped = 0

    def note(self, *, failed: bool) -> None:
        with self._lock:
            self.answered += not failed
            self.failed += failed


class Runner:
    """The threads that send the requests. ``error`` is what ended the batch before its end, if anything did."""

    def __init__(self, instance: ServedInstance, token: str, sink: Sink, width: int) -> None:
        self.counts = Counts()
        self.error: MedusaError | None = None
        self._instance = instance
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        self._sink = sink
        self._lock = threading.Lock()
        self._connections: set[http.client.HTTPConnection] = set()
        self._feed = Feed(width)
        self._threads = [threading.Thread(target=self._work, name=f"batch-{n}", daemon=True) for n in range(width)]

    def run(self, source: Source, taken: CustomIds, done: CustomIds) -> None:
        """Read all requests, and return when each has its result, or after ``stop`` or an error.

        Those that are ``done`` are skipped. ``taken`` gets the custom_ids of all others.
        """
        for thread in self._threads:
            thread.start()
        try:
            for number, line in source.lines():
                request = self._parse(number, line, taken, done)
                if request is not None and not self._feed.put(request):
                    break
                if self._feed.stopped:
                    break
        except MedusaError as error:
            self._end(error)
        self._feed.close()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.2)  # with a time limit, so that signal handlers run

    def stop(self) -> None:
        """Take no more requests, and end those that run. They have no result."""
        self._feed.stop()
        with self._lock:
            for connection in self._connections:
                if connection.sock is not None:
                    hang_up(connection.sock)

    def _connect(self) -> http.client.HTTPConnection:
        connection = self._instance.connect(_LONGEST_ANSWER_S)
        with self._lock:
            self._connections.add(connection)
        return connection

    def _disconnect(self, connection: http.client.HTTPConnection | None) -> None:
        if connection is not None:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _parse(self, number: int, line: bytes | None, taken: CustomIds, done: CustomIds) -> BatchRequest | None:
        """Return the line's request; None, with a result of its own, for a bad line, and for one that is done."""
        try:
            request = lines.parse_request(number, line)
        except BadLineError as error:
            self._refuse(error, done)
            return None
        if request.custom_id in done:
            self.counts.skipped += 1
            return None
        if not taken.add(request.custom_id):
            expected = "expected a custom_id of its own, found that of an earlier line"
            self._refuse(BadLineError(number, expected, request.custom_id), done)
            return None
        return request

    def _refuse(self, error: BadLineError, done: CustomIds) -> None:
        if lines.bad_line_key(str(error)) in done:
            self.counts.skipped += 1
        else:
            self._write(lines.failure(error.custom_id, lines.INVALID, str(error)), failed=True)

    def _work(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while (request := self._feed.take()) is not None:
            try:
                connection = self._answer(request, connection)
            except MedusaError as error:
                self._end(error)
                break
            finally:
                self._feed.done(request)
        self._disconnect(connection)

    def _answer(
        self, request: BatchRequest, connection: http.client.HTTPConnection | None
    ) -> http.client.HTTPConnection | None:
        """Send a request until it has an answer, and write that. Return the connection for the next request."""
        tries = 0
        while not self._feed.stopped:
            is_new = connection is None
            try:
                connection = connection or self._connect()
                if self._feed.stopped:  # perhaps before this connection was known
                    break
                connection.request("POST", request.url, request.body, self._headers)
                response = connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                self._disconnect(connection)
                connection = None
                if self._feed.stopped:
                    break
                self._check_alive()
                tries += is_new  # the server may have closed an idle connection meanwhile
                if tries >= _TRIES:
                    message = f"line {request.number}: the connection broke {tries} times ({error})"
                    self._write(lines.failure(request.custom_id, "connection_lost", message), failed=True)
                    break
                time.sleep(_PAUSE_S if is_new else 0)
                continue
            pause_s = self._pause_s(response, body)
            if pause_s is not None:
                waits = _code(body) in _FULL
                tries += not waits
                if waits or tries < _TRIES:
                    time.sleep(pause_s)
                    continue
            if self._feed.stopped:
                break
            request_id = response.headers.get("X-Request-Id", "")
            line = lines.result(request.custom_id, response.status, request_id, body)
            self._write(line, failed=response.status >= 400)
            break
        return connection

    def _pause_s(self, response: http.client.HTTPResponse, body: bytes) -> float | None:
        """Return how many seconds to wait before another try; None if this is the answer."""
        if response.status not in (429, 502, 503):
            return None
        self._check_alive()
        given = response.headers.get("Retry-After", "")
        return min(float(given), _LONGEST_PAUSE_S) if given.isdecimal() else _PAUSE_S

    def _check_alive(self) -> None:
        """Raise MedusaError with the instance's last words if it has ended."""
        if not self._instance.alive():
            raise self._instance.failure("ended during the batch")

    def _write(self, line: bytes, *, failed: bool) -> None:
        self._sink.write(line)
        self.counts.note(failed=failed)

    def _end(self, error: MedusaError) -> None:
        if not self._feed.stopped:
            self.error = error
        self.stop()


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
