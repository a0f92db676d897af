"""Tokens per second of a warm process, at batch 1 and 8. A fast start must not come at the price of slow serving."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from medusa_adapters.bench.coldstart.contestants import Contestant, Medusa, Question
from medusa_adapters.bench.coldstart.metrics import add
from medusa_adapters.bench.openai_client import stream
from medusa_adapters.bench.process import Process
from medusa_adapters.bench.result import Result
from medusa_adapters.bench.served_instance import ServedInstance
from medusa_adapters.cli.progress import note
from medusa_runtime.errors import ConfigError, MedusaError

from benchmarks.coldstart.llama_cpp import LlamaCpp
from benchmarks.coldstart.others import OFFLINE, SCRIPTS, Transformers
from benchmarks.coldstart.vllm_baselines import VllmBaseline

BATCHES = (1, 8)


def measure_steady(
    result: Result, contestants: Sequence[Contestant], question: Question, *, tokens: int, runs: int
) -> None:
    """Add the metrics ``tokens_per_s_b1`` and ``tokens_per_s_b8`` to the result.

    They are the generated tokens over the time from the first request to the last token. ``tokens`` is the number for
    each sequence. Raises ConfigError for a contestant that generates no text.
    """
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
        add(result, name, f"tokens_per_s_b{batch}", rates_found)


def _rates(contestant: Contestant, question: Question, tokens: int) -> dict[int, float]:
    if isinstance(contestant, Transformers):
        return _transformers(question, tokens)
    with warm_server(contestant, question, "--steady") as (instance, body), instance.explained_failures():
        return {batch: _together(instance, body | {"max_tokens": tokens}, batch) for batch in BATCHES}


@contextmanager
def warm_server(
    contestant: Contestant, question: Question, flag: str
) -> Iterator[tuple[ServedInstance, dict[str, Any]]]:
    """Start a contestant's server, and have it answer the question once. All are measured with the same client.

    Yields the server and the body of a completion request. Raises ConfigError, which names ``flag``, for a contestant
    without a server.
    """
    body = question.body | {"stream_options": {"include_usage": True}}
    if isinstance(contestant, Medusa):
        started = contestant.start(contestant.prepared(question))
    elif isinstance(contestant, VllmBaseline):
        started, body = contestant.start(question), body | {"model": contestant.model}
    elif isinstance(contestant, LlamaCpp):
        started = contestant.start(question)
    else:
        raise ConfigError(f"{flag}: {contestant.name} has no server that generates text")
    with started as instance:
        if isinstance(contestant, Medusa):
            instance.wait_ready(every_s=0.05)  # vLLM's listens when it is ready
        instance.completion(body | {"max_tokens": 4})
        yield instance, body


def _together(instance: ServedInstance, body: dict[str, Any], batch: int) -> float:
    """Return the tokens per second of ``batch`` streams that start at the same time."""
    connections = [instance.connect() for _ in range(batch)]
    with ThreadPoolExecutor(batch) as pool:
        began = time.monotonic_ns()
        done = list(pool.map(lambda connection: stream(connection, body), connections))
    for connection in connections:
        connection.close()
    if any(completion.tokens != body["max_tokens"] for completion in done):
        raise MedusaError(f"expected {body['max_tokens']} tokens of each stream, found {[c.tokens for c in done]}")
    return sum(c.tokens for c in done) / ((max(c.end_ns for c in done) - began) / 1e9)


def _transformers(question: Question, tokens: int) -> dict[int, float]:
    script = str(SCRIPTS / "transformers_generate.py")
    batches = ",".join(map(str, BATCHES))
    with Process([sys.executable, script, question.folder, question.prompt, str(tokens), batches], OFFLINE) as process:
        process.line()
        return {int(batch): rate for batch, rate in json.loads(process.line())["tokens_per_s"].items()}
