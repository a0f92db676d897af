"""`medusa batch`: answer a file of requests with one instance, and end.

The instance is `medusa serve` in a process of its own, on a free port of this machine that only this command has the
token for. So each engine, route and limit is that of a function.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from medusa_runtime.config import OPTIONS, Settings, from_env, to_env
from medusa_runtime.errors import ConfigError, MedusaError

from ..flags import add_model, model_argument
from ..progress import CLEAR_LINE, note, size
from ..serve import add_settings, with_engine_flags
from .runner import Counts, Runner

if TYPE_CHECKING:
    from ...bench.served_instance import ServedInstance
    from .source import Source

# The settings of an instance's server, and of how a function starts, which a batch chooses itself.
_NOT_TAKEN = frozenset(
    ("model", "handler", "platform", "host", "port", "token", "api_key_file", "cors_origins", "access_log", "traces",
     "engine_start", "heartbeat_s", "hold_s", "drain_s", "read_timeout_s", "write_timeout_s", "server_timing",
     "max_waiting", "allow_lora", "log_level", "log_format", "load_priority", "group", "layers", "body_memory_mb")
)  # fmt: skip
_TAKEN = tuple(option for option in OPTIONS if option.field not in _NOT_TAKEN)
_START_S = 24 * 3600.0  # a first start may fetch a large model
_MOVING_S, _PLAIN_S = 0.5, 30.0
_STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer a file of requests in the form of OpenAI's Batch API, one a line, with one model, and end. Flags of "
        "the engine are those of medusa serve. With --engine vllm, flags of vllm serve follow behind --."
    )
    add_model(parser)
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="requests: a path, a URL, or - for stdin")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="results: a path, or a URL for fsspec")
    parser.add_argument("--resume", action="store_true", help="go on behind the results that the output has already")
    add_settings(parser, _TAKEN)


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if every request was answered, 1 if one failed, and 130, 143 or 129 if a signal ended the batch."""
    flags = {option.field: getattr(arguments, option.field) for option in _TAKEN}
    given = from_env(os.environ, **flags | {"model": model_argument(arguments)})
    if given.model is None:
        raise ConfigError("there is nothing to ask: expected --model (a checkpoint)")
    token = os.urandom(16).hex()
    width = given.max_concurrency + max(8, given.max_concurrency // 4)  # the next ones wait in the engine
    settings = replace(
        with_engine_flags(given, arguments.engine_flags), handler=None, platform="local", host="127.0.0.1", port=0,
        token=token, api_key_file=None, cors_origins=None, engine_start="now", max_waiting=max(width, 64),
        timeout_s=0.0 if arguments.timeout_s is None else given.timeout_s,
    )  # fmt: skip
    stop = _Stop()
    with stop:
        return _run(arguments, settings, token, width, stop)


def _run(arguments: argparse.Namespace, settings: Settings, token: str, width: int, stop: _Stop) -> int:
    from ...bench.served_instance import ServedInstance, serve_command
    from .custom_ids import CustomIds
    from .sink import open_sink
    from .source import Source

    done, taken = CustomIds(), CustomIds()
    source = Source(arguments.input, settings.max_body_bytes, lambda: stop.reason is not None)
    sink = open_sink(arguments.output, resume=arguments.resume, note=done.add)
    began = time.monotonic()
    error, runner = None, None
    try:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MEDUSA_")}
        environ |= {**_kept(), **to_env(settings)}
        with ServedInstance(serve_command(), environ, inherit=False, start_timeout_s=_START_S) as instance:
            note(f"loading {settings.model}")
            instance.grace_s = 2.0
            if stop.wait_ready(instance):
                note(f"ready after {time.monotonic() - began:.1f} s")
                runner = Runner(instance, token, sink, width)
                stop.runner = runner
                with _Progress(runner.counts, source):
                    runner.run(source, taken, done)
                error = runner.error
    finally:
        sink.close()
        source.close()
    counts = Counts() if runner is None else runner.counts
    note(f"{_described(counts)} in {time.monotonic() - began:.1f} s")
    if error is not None:
        raise error
    if stop.reason is not None:
        note("stopped before the end; --resume goes on behind these results")
        return _STOPPED[stop.reason]
    return int(counts.failed > 0)


def _kept() -> dict[str, str]:
    """Return the variables of ours that are no settings, such as those of the node agent."""
    known = {option.variable for option in OPTIONS}
    return {name: value for name, value in os.environ.items() if name.startswith("MEDUSA_") and name not in known}


class _Stop:
    """The signals that end a batch early: what has been answered is kept. ``reason`` is the first of them."""

    def __init__(self) -> None:
        self.reason: signal.Signals | None = None
        self.runner: Runner | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Stop:
        self._before = {number: signal.signal(number, self._receive) for number in _STOPPED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.reason is None:
            self.reason = signal.Signals(number)
            # Not here: the thread that is interrupted may hold the locks that this needs.
            threading.Thread(target=self._stop, daemon=True).start()

    def _stop(self) -> None:
        if self.runner is not None:
            self.runner.stop()

    def wait_ready(self, instance: ServedInstance) -> bool:
        """Wait until an instance is ready. Return False if a signal came before. Raises MedusaError."""
        try:
            return self._wait_ready(instance)
        except MedusaError:
            if self.reason is None and (error := instance.own_error()) is not None:
                raise error from None
            raise

    def _wait_ready(self, instance: ServedInstance) -> bool:
        deadline = time.monotonic() + _START_S
        while self.reason is None:
            with instance.explained_failures():
                if instance.exchange("GET", "/readyz").status == 200:
                    return True
            if time.monotonic() > deadline:
                raise instance.failure(f"was not ready within {_START_S:g} s")
            time.sleep(0.05)
        return False


class _Progress:
    """A line on stderr about what has been done: a moving one on a terminal, and one now and then elsewhere."""

    def __init__(self, counts: Counts, source: Source) -> None:
        self._counts = counts
        self._source = source
        self._began = time.monotonic()
        self._moving = sys.stderr.isatty()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._moving:
            sys.stderr.write(CLEAR_LINE)

    def _run(self) -> None:
        while not self._ended.wait(_MOVING_S if self._moving else _PLAIN_S):
            text = self._describe()
            sys.stderr.write(f"{CLEAR_LINE}{text}" if self._moving else f"{text}\n")
            sys.stderr.flush()

    def _describe(self) -> str:
        elapsed_s = time.monotonic() - self._began
        read, total = self._source.read_bytes, self._source.size_bytes
        where = f"{size(read)} of {size(total)} read" if total else f"{size(read)} read"
        finished = self._counts.answered + self._counts.failed
        return f"{_described(self._counts)}, {finished / max(elapsed_s, 1e-9):.1f} requests/s, {where}"


def _described(counts: Counts) -> str:
    parts = [f"{counts.answered:,} answered", f"{counts.failed:,} failed"]
    return ", ".join(parts + [f"{counts.skipped:,} skipped"] * bool(counts.skipped))
