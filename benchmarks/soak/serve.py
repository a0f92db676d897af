"""A function under mixed requests, and with ``--faults`` while its processes are killed and stopped."""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from medusa_adapters.bench.process import runs
from medusa_adapters.bench.served_instance import ServedInstance, serve_command
from medusa_runtime.errors import MedusaError

from benchmarks.soak.adapter import write_adapter
from benchmarks.soak.footprint import MB, footprint
from benchmarks.soak.growth import enough
from benchmarks.soak.requests import Client, Wrong

_FUNCTION = """
from medusa_handler import HttpError

class Handler:
    def load(self, context):
        self.model = context.model

    def predict(self, request):
        if request.path != "/":
            raise HttpError(404, "no such path")
        body = request.object
        if body.get("stream"):
            return self.model.stream(body["prompt"], max_tokens=body["max_tokens"])
        return {"text": self.model.generate(body["prompt"], max_tokens=body["max_tokens"])}
"""
_SERVED = "soaked"
_LIMITS = (
    "--max-concurrency", "8", "--max-waiting", "12", "--max-body-mb", "1", "--timeout-s", "6", "--read-timeout-s", "2",
    "--write-timeout-s", "2", "--heartbeat-s", "1", "--max-loras", "3", "--drain-s", "3", "--kv-cache-mb", "16",
    "--access-log", "json", "--log-level", "warning",
)  # fmt: skip
_PATIENCE_S = 90.0
_SHOWN_CHARACTERS = 80
_MOST_ROUND_S, _ROUNDS = 8.0, 12  # of requests, between two samples; and how many fit
_QUIET_S = 3.0  # until what clients have left has ended
_FAULT_EVERY_S = (0.2, 3.0)


class Soak:
    """One function, its clients, and what was seen of both. ``samples``: requests so far, and the footprint then."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._random = random.Random(arguments.seed)
        self._lock = threading.Lock()
        self._serving = threading.Event()
        self.asked: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._adapters = [write_adapter(folder / "adapters" / f"a{number}", arguments.model) for number in range(5)]
        (folder / "handler.py").write_text(_FUNCTION)
        (folder / "tmp").mkdir()

    def run(self) -> None:
        """Serve for as long as asked, and until there are enough samples; start a function that a fault ended again."""
        end = time.monotonic() + self._arguments.seconds
        while self._goes_on(end):
            before = self._left()
            with ServedInstance(self._command(), {"TMPDIR": str(self._folder / "tmp")}) as instance:
                instance.wait_ready(every_s=0.1)
                tree: set[int] = set()
                while self._goes_on(end) and instance.alive():
                    self._round(instance, tree)
                    tree |= set(instance.tree())
                if instance.alive():
                    instance.process.terminate()
                    instance.process.wait(30)
                elif not self._arguments.faults:
                    self.wrong.append(str(instance.failure("ended")))
                self.killed["ends of the instance"] += 1
                time.sleep(1)
                if left := [pid for pid in tree if runs(pid)]:
                    self.wrong.append(f"processes were left: {left}")
            if (now := self._left()) != before:
                self.wrong.append(f"left behind: {now} instead of {before}")

    def _goes_on(self, end: float) -> bool:
        return time.monotonic() < end or not (self.wrong or enough(self.samples))

    def _command(self) -> list[Any]:
        function = (
            "--model",
            self._arguments.model,
            "--served-model-name",
            _SERVED,
            "--allow-lora",
            self._folder / "adapters",
        )
        return serve_command(
            *function, "--handler", f"{self._folder}/handler.py:Handler", "--node-socket", "none", *_LIMITS
        )

    def _left(self) -> list[str]:
        return sorted(str(path) for path in (self._folder / "tmp").iterdir())

    def _round(self, instance: ServedInstance, tree: set[int]) -> None:
        ending = time.monotonic() + min(_MOST_ROUND_S, self._arguments.seconds / _ROUNDS)
        clients = [threading.Thread(target=self._ask, args=(instance, ending, self._random.random()))
                   for _ in range(self._arguments.clients)]  # fmt: skip
        for client in clients:
            client.start()
        while self._arguments.faults and time.monotonic() < ending and instance.alive():
            time.sleep(self._random.uniform(*_FAULT_EVERY_S))
            tree |= set(instance.tree())
            self._fault(instance)
        for client in clients:
            client.join()
        time.sleep(_QUIET_S)
        if self._arguments.faults:
            self._check_it_answers(instance)
        if instance.alive():
            self.samples.append((float(sum(self.asked.values())), self._sample(instance)))

    def _fault(self, instance: ServedInstance) -> None:
        with suppress(IndexError, OSError):
            pid = self._random.choice(instance.tree()[1:])
            role = Path(f"/proc/{pid}/comm").read_text().strip()
            if role == "function" and self._random.random() < 0.8:
                return  # it ends the instance
            number = self._random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            os.kill(pid, number)
            self.killed[f"{number.name} {role}"] += 1

    def _check_it_answers(self, instance: ServedInstance) -> None:
        client = Client(instance.port, _SERVED, self._adapters, _PATIENCE_S, 0)
        deadline = time.monotonic() + _PATIENCE_S
        while instance.alive():
            with suppress(OSError, Wrong, MedusaError):
                if client.kinds["completion"]() == 200:
                    return
            if time.monotonic() > deadline:
                self.wrong.append(str(instance.failure(f"does not answer {_PATIENCE_S:g} s after its last fault")))
                instance.process.kill()
                return
            time.sleep(0.3)

    def _ask(self, instance: ServedInstance, ending: float, seed: float) -> None:
        client = Client(instance.port, _SERVED, self._adapters, _PATIENCE_S, int(seed * 2**32), self._arguments.only)
        while time.monotonic() < ending and instance.alive():
            try:
                kind, status = client.ask()
            except (Wrong, TimeoutError) as error:
                kind, status = f"wrong ({str(error)[:_SHOWN_CHARACTERS]})", 0
                if not self._arguments.faults or isinstance(error, TimeoutError):
                    self.wrong.append(str(error))
            except (OSError, Exception) as error:  # noqa: BLE001 what a client sees is what is looked for
                kind, status = "broken", 0
                if not self._arguments.faults:
                    self.wrong.append(repr(error))
            with self._lock:
                self.asked[f"{kind} {status}"] += 1

    def _sample(self, instance: ServedInstance) -> dict[str, float]:
        held = footprint(instance.tree(), [self._folder / "tmp"])
        held["log MB"] = len(instance.output()) / MB
        with suppress(MedusaError):
            text = instance.exchange("GET", "/metrics").text
            held["metrics lines"] = float(text.count("\n"))
            for name in ("medusa_engine_kv_tokens_used", "medusa_requests_running", "medusa_requests_waiting"):
                for line in text.splitlines():
                    if line.startswith(name):
                        held[line.rpartition(" ")[0]] = float(line.rpartition(" ")[2])
            held["timeline KB"] = len(instance.exchange("GET", "/timeline").body) / 1024
            held["openapi KB"] = len(instance.exchange("GET", "/openapi.json").body) / 1024
            held["models KB"] = len(instance.exchange("GET", "/v1/models").body) / 1024
        return held
