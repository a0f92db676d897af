"""Tokens per second once warm, at batch 1 and 8: a fast start must not be bought with slow serving."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from medusa_runtime.errors import ConfigError, MedusaError

from ..cli.progress import note
from . import openai_client
from .contestants import (
    OFFLINE,
    SCRIPTS,
    START_TIMEOUT_S,
    Contestant,
    Medusa,
    Question,
    Transformers,
    connect,
    wait_ready,
)
from .process import Process
from .result import Result
from .vllm_baselines import VllmBaseline

BATCHES = (1, 8)


def measure_steady(
    result: Result, contestants: Sequence[Contestant], question: Question, *, tokens: int, runs: int
) -> None:
    """Rows ``tokens_per_s_b1`` and ``_b8``: generated tokens over the time from first request to last token."""
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(runs):
        for contestant in contestants if number % 2 == 0 else reversed(contestants):
            by_batch = _rates(contestant, question, tokens)
            name = contestant.name
            note(
                f"run {number + 1}: {name} " + ", ".join(f"{rate:.1f} tokens/s at {b}" for b, rate in by_batch.items())
            )
            for batch, rate in by_batch.items():
                found.setdefault((name, batch), []).append(rate)
    for (name, batch), rates_found in found.items():
        result.add(name, f"tokens_per_s_b{batch}", "tokens/s", rates_found)


def _rates(contestant: Contestant, question: Question, tokens: int) -> dict[int, float]:
    if isinstance(contestant, Medusa):
        return _served(contestant, contestant.prepared(question), tokens)
    if isinstance(contestant, Transformers):
        return _transformers(question, tokens)
    if isinstance(contestant, VllmBaseline):
        return _served(contestant, question, tokens)
    raise ConfigError(f"--steady: {contestant.name} generates no text")


def _served(server: Medusa | VllmBaseline, question: Question, tokens: int) -> dict[int, float]:
    """Over HTTP, from the same client; vLLM listens when it is ready, ours before."""
    port = openai_client.free_port()
    with server.start(question, port) as process:
        connection = connect(process, port)
        if isinstance(server, Medusa):
            wait_ready(process, connection, 0.05)
        body = {
            "prompt": question.prompt,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        } | ({"model": server.model} if server.model else {})
        with process.answering():
            openai_client.stream(connection, body | {"max_tokens": 4})
            return {batch: _together(port, body | {"max_tokens": tokens}, batch) for batch in BATCHES}


def _together(port: int, body: dict[str, object], batch: int) -> float:
    """Tokens per second of ``batch`` streams that start at once."""
    connections = [openai_client.connect(port, lambda: True, START_TIMEOUT_S) for _ in range(batch)]
    with ThreadPoolExecutor(batch) as pool:
        began = time.monotonic_ns()
        done = list(pool.map(lambda connection: openai_client.stream(connection, body), connections))
    for connection in connections:
        connection.close()
    expected = body["max_tokens"]
    if any(completion.tokens != expected for completion in done):
        raise MedusaError(f"expected {expected} tokens of each stream, found {[c.tokens for c in done]}")
    return sum(c.tokens for c in done) / ((max(c.end_ns for c in done) - began) / 1e9)


def _transformers(question: Question, tokens: int) -> dict[int, float]:
    script = str(Path(SCRIPTS) / "transformers_generate.py")
    batches = ",".join(map(str, BATCHES))
    with Process([sys.executable, script, question.folder, question.prompt, str(tokens), batches], OFFLINE) as process:
        process.line()
        return {int(batch): rate for batch, rate in json.loads(process.line())["tokens_per_s"].items()}
