"""Timed batches: the tokens per second of an engine or of a served instance."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from medusa_adapters.bench.served_instance import ServedInstance, serve_command
from medusa_runtime.engine.base import Delta, GenerateRequest

PROMPT_TOKENS = 32


def engine_rate(engine: Any, requests: Iterable[GenerateRequest]) -> float:
    """Let an engine in this process answer all requests. Return the tokens per second, from the first token on."""
    arrived: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    running = 0
    for request in requests:
        engine.add(request, arrived.put)
        running += 1
    count, began = 0, 0.0
    while running:
        delta = arrived.get()
        began = began or time.perf_counter()
        count += len(delta.token_ids)
        running -= delta.finish_reason is not None
    return count / max(time.perf_counter() - began, 1e-9)


def served_times(model: str | Path, sizes: Sequence[int], tokens: int) -> tuple[float, list[float]]:
    """Serve a model. Return the seconds from the exec to the first token, and a rate for each batch size.

    A rate is the tokens per second of a batch in which each prompt is continued by ``tokens`` tokens.
    """
    began = time.time()
    most = max(sizes)
    command = serve_command("--model", model, "--device", "cpu", "--state", "none", "--max-concurrency", str(most))
    with ServedInstance(command) as served:
        served.completion(greedy(0, 1))
        first = time.time() - began
        _complete(served, most, 4)
        rates = []
        for size in sizes:
            started = time.perf_counter()
            _complete(served, size, tokens)
            rates.append(size * tokens / (time.perf_counter() - started))
        return first, rates


def greedy(row: int, tokens: int) -> dict[str, Any]:
    """Return the body of a request for ``tokens`` tokens. Its prompt differs from row to row."""
    prompt = [(row * 31 + at * 7) % 5000 + 3 for at in range(PROMPT_TOKENS)]
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}


def _complete(served: ServedInstance, batch: int, tokens: int) -> None:
    """Request the continuations of ``batch`` prompts at the same time, and wait for all."""
    threads = [threading.Thread(target=served.completion, args=(greedy(row, tokens),)) for row in range(batch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
