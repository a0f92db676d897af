"""Clients of an instance while something is done to it, and what must be as before when it is over."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

LONG = {"prompt": "a", "max_tokens": 450, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "a", "max_tokens": 4, "temperature": 0}


class Requests:
    """Clients that ask again and again while a process is killed, and how each of their requests ends."""

    def __init__(self, serving: Any) -> None:
        self.answers: list[Any] = []
        self._serving = serving
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, body: dict[str, Any], clients: int) -> None:
        """Their requests differ in length: if they all ended at once, none would run for a moment."""
        bodies = [body | {"max_tokens": body["max_tokens"] * (4 - number) // 4} for number in range(clients)]
        self._threads = [threading.Thread(target=self._ask, args=(body,), daemon=True) for body in bodies]
        for thread in self._threads:
            thread.start()

    def _ask(self, body: dict[str, Any]) -> None:
        while not self._ended.is_set():
            try:
                self.answers.append(self._serving.request("POST", "/v1/completions", body, timeout_s=100)[:2])
            except OSError as error:
                self.answers.append(error)
                time.sleep(0.05)

    def end(self) -> list[Any]:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return self.answers


def shared_files() -> set[str]:
    """Names in /dev/shm, without those of Python's multiprocessing and Intel's OpenMP, which others use."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("psm_", "sem.", "__KMP_"))}
