"""A server process for the tests: the real `serve`, around an engine that counts words instead of running a model.

Its model says "w0 w1 w2 …", one word a token. What happens when is scripted through stdin, one JSON line each.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import medusa_vllm  # noqa: F401 - registers the engine that has an HTTP server of its own
from medusa_handler.server import gunicorn_options
from medusa_handler.server.function_process import serve
from medusa_handler.user_code import function
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, Embedding, EngineInfo, GenerateRequest, TokenLogprob
from medusa_runtime.errors import ContextLengthError, EngineError, MedusaError, OverloadedError
from medusa_runtime.liveness import Heartbeats
from medusa_runtime.timeline import Timeline


def _script(prompt: str | tuple[int, ...]) -> list[str]:
    """The pieces of what a prompt like ``say:words<assistant>`` has the model say."""
    said = prompt.partition("say:")[2].partition("<assistant>")[0] if isinstance(prompt, str) else ""
    return [said[start : start + 3] for start in range(0, len(said), 3)]


class ScriptedStream:
    def __init__(self, engine: ScriptedEngine, request: GenerateRequest) -> None:
        self.request = request
        self.items: queue.SimpleQueue[Delta | MedusaError] = queue.SimpleQueue()
        self.closed = False
        self.ended = False
        self.engine = engine
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        engine, params = self.engine, self.request.params
        engine.up.wait()
        prompt = self.request.prompt
        length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        if length > 100:
            text = f"this model's maximum context length is 100 tokens, and the prompt has {length}"
            self.items.put(ContextLengthError(text, "prompt"))
            return
        said = _script(prompt)
        total = len(said) or params.max_tokens or 12
        for number in range(total):
            while engine.held.is_set() and not self.closed:
                time.sleep(0.01)
            if self.closed:
                return
            if engine.lost.is_set():
                self.items.put(EngineError("the engine process ended while it worked on this request"))
                return
            time.sleep(engine.token_s)
            text = said[number] if said else ("" if number == 0 else " ") + f"w{number}"
            stopped = next((stop for stop in params.stop if stop == text.strip()), None)
            last = stopped is not None or number == total - 1
            finish = "stop" if stopped or (said and last) else "length" if last else None
            top = tuple((n, f"alt{n}", -1.0 - n) for n in range(params.logprobs or 0))
            chosen = (TokenLogprob(number, text, -0.5, top),) if params.logprobs is not None else ()
            self.items.put(
                Delta(self.request.id, "" if stopped else text, (number,), chosen, finish, stopped, length, number + 1)
            )
            if last:
                return

    def get(self, timeout_s: float | None = None) -> Delta | None:
        try:
            item = self.items.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, MedusaError):
            self.ended = True
            raise item
        self.ended = item.finish_reason is not None
        return item

    def __iter__(self) -> Any:
        while not self.ended:
            delta = self.get()
            if delta is not None:
                yield delta

    def close(self) -> None:
        if not self.ended and not self.closed:
            self.engine.cancelled += 1
        self.closed = True

    def __enter__(self) -> ScriptedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ScriptedEngine:
    started = True
    on_change = staticmethod(lambda: None)

    def __init__(self, token_s: float, seen_fd: int, http_port: int, architecture: str) -> None:
        self.token_s = token_s
        self.architecture = architecture
        self.http_port = http_port
        self.up, self.held, self.lost, self.full = (threading.Event() for _ in range(4))
        self.cancelled = 0
        self.seen_fd = seen_fd

    @property
    def ready(self) -> bool:
        return self.up.is_set()

    @property
    def info(self) -> EngineInfo | None:
        return EngineInfo("scripted", self.architecture, 1000, 100, (2,), 1000) if self.ready else None

    def start(self) -> None:
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in sys.stdin:
            for name, value in json.loads(line).items():
                event = {"ready": self.up, "hold": self.held, "lose": self.lost, "full": self.full}[name]
                (event.set if value else event.clear)()
            self.on_change()
            print("done", flush=True)

    def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        if not self.up.wait(timeout_s):
            raise EngineError("not ready in time")
        assert self.info is not None
        return self.info

    def generate(self, request: GenerateRequest) -> ScriptedStream:
        os.write(self.seen_fd, (repr(request.prompt) + "\n").encode())
        if self.full.is_set():
            raise OverloadedError("the queue is full", 7.0)
        return ScriptedStream(self, request)

    def connect_http(self, wait_check: Callable[[], None]) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.http_port))

    def embed(self, inputs: list[Any], *_: object, **__: object) -> list[Embedding]:
        return [Embedding(3, array("f", [0.25, 0.75]).tobytes()) for _ in inputs]

    def stats(self) -> dict[str, Any]:
        return {"running": 0, "cancelled_total": self.cancelled}

    def tokenize(self, text: str, add_special_tokens: bool = True, **_: object) -> list[int]:
        return [1] * add_special_tokens + [len(word) for word in text.split()]

    def detokenize(self, token_ids: list[int]) -> str:
        return " ".join(f"t{token}" for token in token_ids)


class Progress(NamedTuple):
    state: str = "fetching"
    fetched_bytes: int = 250
    total_bytes: int = 1000
    mb_per_s: float = 12.5
    eta_s: float = 3.0
    retries: int = 0
    error: str | None = None


class ScriptedRegion:
    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def wait_index(self, timeout_s: float | None = None) -> Any:
        return SimpleNamespace(version="1")

    def file(self, name: str) -> bytes | None:
        return self.files[name].encode() if name in self.files else None

    def progress(self) -> Progress:
        return Progress()


@dataclass(frozen=True)
class Handle:
    settings: Settings
    timeline: Timeline
    engine: Any
    region: Any
    heartbeats: Heartbeats

    def fail(self, error: MedusaError) -> None:
        print(f"failed: {error.code}: {error}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s: %(message)s")
    options = json.loads(arguments[0])
    with_engine, ready, token_s = options.pop("engine", True), options.pop("ready", True), options.pop("token_s", 0.0)
    gunicorn_options.KEEPALIVE_S = options.pop("keepalive_s", gunicorn_options.KEEPALIVE_S)
    function._SLOW_S = options.pop("slow_s", function._SLOW_S)
    files, http_port = options.pop("files", {}), options.pop("http_port", 0)
    architecture = options.pop("architecture", "Words")
    if http_port:
        options.setdefault("engine", "vllm")
    options.setdefault("model", "/models/words" if with_engine else None)
    settings = Settings(**options)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    timeline = Timeline.create("function")
    engine = (
        ScriptedEngine(token_s, os.open("prompts", os.O_CREAT | os.O_WRONLY | os.O_APPEND), http_port, architecture)
        if with_engine
        else None
    )
    if engine is not None and ready:
        engine.up.set()
    print(listener.getsockname()[1], flush=True)
    region = ScriptedRegion(files) if with_engine else None
    handle: Any = Handle(settings, timeline, engine, region, Heartbeats())
    os._exit(serve(listener, handle, settings))
