"""A served function in a process of its own, for a project's tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from medusa_runtime.errors import MedusaError

from .bench.served_instance import HttpResponse, ServedInstance, serve_command

_STOP_S = 40.0
_DONE = "[DONE]"


class TrialError(AssertionError):
    """The function did not start, or a stream was cut. The message ends with the server's output."""


class _Instance(ServedInstance):
    grace_s = _STOP_S  # longer than it waits for requests


class Trial:
    """``with Trial("--handler", "handler.py") as function:`` runs `medusa serve` with these arguments, until ready.

    The server uses a free port of 127.0.0.1, and is stopped with SIGTERM, as by a platform.
    """

    def __init__(self, *arguments: str, timeout_s: float = 120.0) -> None:
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._instance: ServedInstance | None = None
        self.url = ""  # http://127.0.0.1:…, while it runs

    def __enter__(self) -> Self:
        # Not tied: a test may start it in a thread that ends before the test does.
        self._instance = _Instance(serve_command(*self._arguments), start_timeout_s=self._timeout_s, tied=False)
        try:
            self._instance.wait_ready()
        except MedusaError as error:
            printed = self._instance.output()
            self.close()
            raise TrialError(f"{error}\n\nThe server printed:\n{printed}") from None
        except BaseException:
            self.close()
            raise
        self.url = self._instance.url
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._instance is not None:
            self._instance.close()
        self._instance = None

    def post(self, path: str, body: str | bytes, headers: Mapping[str, str] | None = None) -> HttpResponse:
        """Send a POST and return its answer. A status of 400 or more raises nothing."""
        return self._request("POST", path, body.encode() if isinstance(body, str) else body, headers)

    def get(self, path: str) -> HttpResponse:
        return self._request("GET", path, None, None)

    def events(self, path: str, body: str | bytes, headers: Mapping[str, str] | None = None) -> list[str]:
        """Return the data of a stream's events, without the final ``[DONE]``. Raises TrialError if that is missing."""
        answer = self.post(path, body, headers)
        events = [
            "\n".join(line[len("data: ") :] for line in block.splitlines() if line.startswith("data: "))
            for block in answer.text.split("\n\n")
            if "data: " in block
        ]
        if answer.status != 200 or events[-1:] != [_DONE]:
            raise TrialError(f"expected a stream that ends with {_DONE}, found status {answer.status}: {answer.text}")
        return events[:-1]

    def _request(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None) -> HttpResponse:
        assert self._instance is not None, "a function that is not running"
        given = {"Content-Type": "application/json"} | {key.title(): text for key, text in (headers or {}).items()}
        return self._instance.exchange(method, path, body, given, timeout_s=self._timeout_s)
