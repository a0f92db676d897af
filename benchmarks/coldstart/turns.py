"""The time to the first token of a chat's turns, in a warm process. Each turn's prompt begins with the one before."""

from __future__ import annotations

import time
from collections.abc import Sequence

from medusa_adapters.bench.coldstart.contestants import Contestant, Question
from medusa_adapters.bench.coldstart.metrics import add
from medusa_adapters.bench.openai_client import stream
from medusa_adapters.bench.result import Result
from medusa_adapters.cli.progress import note

from benchmarks.coldstart.steady import warm_server

_SENTENCES = 40  # of the first turn; with ten tokens in each, it has about 400
_MORE = 6  # sentences that each further turn adds


def measure_turns(
    result: Result, contestants: Sequence[Contestant], question: Question, *, turns: int, runs: int
) -> None:
    """Add the metrics ``first_turn_ttft_s`` and ``next_turn_ttft_s`` to the result, from request to first token.

    Raises ConfigError for a contestant without a server.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(runs):
        for contestant in contestants if number % 2 == 0 else reversed(contestants):
            times = _times(contestant, question, turns)
            note(f"run {number + 1}: {contestant.name} " + ", ".join(f"{each:.3f}" for each in times) + " s")
            found.setdefault((contestant.name, "first_turn_ttft_s"), []).append(times[0])
            found.setdefault((contestant.name, "next_turn_ttft_s"), []).extend(times[1:])
    for (name, metric), values in found.items():
        add(result, name, metric, values)


def prompt_of(question: Question, turn: int) -> str:
    """Return the prompt of a turn, counted from 0. What it says differs from sentence to sentence."""
    count = _SENTENCES + turn * _MORE
    return " ".join(f"In the year {1900 + number}, {question.prompt}." for number in range(count))


def _times(contestant: Contestant, question: Question, turns: int) -> list[float]:
    times = []
    with warm_server(contestant, question, "--turns") as (instance, body), instance.explained_failures():
        for turn in range(turns):
            connection = instance.connect()
            began = time.monotonic_ns()
            answer = stream(connection, body | {"prompt": prompt_of(question, turn), "max_tokens": 8})
            times.append((answer.first_token_ns - began) / 1e9)
            connection.close()
    return times
