"""Requests to replay: recorded ones, and arrivals made from a rate and a coefficient of variation."""

from __future__ import annotations

import csv
import gzip
import io
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, overload

from medusa_runtime.errors import ConfigError, json_excerpt

AZURE = ("azure-code", "azure-conv")


_MOST_REQUESTS = 100_000_000  # of a run
_MOST_TOKENS = 1 << 31


class Request(NamedTuple):
    at_s: float
    model: int  # index in the fleet's models
    prompt_tokens: int
    output_tokens: int


class Requests(Sequence[Request]):
    """Requests stored as columns. Each takes 32 bytes, and none costs the garbage collector time."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._at_s, self._model = array("d"), array("l")
        self._prompt, self._output = array("l"), array("l")
        for at_s, model, prompt, output in requests:
            self._at_s.append(at_s)
            self._model.append(model)
            self._prompt.append(prompt)
            self._output.append(output)

    def __len__(self) -> int:
        return len(self._at_s)

    @overload
    def __getitem__(self, number: int) -> Request: ...

    @overload
    def __getitem__(self, number: slice) -> list[Request]: ...

    def __getitem__(self, number: int | slice) -> Request | list[Request]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        return Request(self._at_s[number], self._model[number], self._prompt[number], self._output[number])

    def __iter__(self) -> Iterator[Request]:
        return map(Request, self._at_s, self._model, self._prompt, self._output)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths of prompts and answers in tokens, by their means, and no longer than ``most``."""

    prompt: float
    output: float
    prompt_sigma: float = 1.0
    output_sigma: float = 0.8
    most: int = 4096

    def draw(self, random_: random.Random) -> tuple[int, int]:
        return self._one(random_, self.prompt, self.prompt_sigma), self._one(random_, self.output, self.output_sigma)

    def _one(self, random_: random.Random, mean: float, sigma: float) -> int:
        value = random_.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return min(max(int(value), 1), self.most)


# Means as published: ShareGPT by MEDUSA (§2), HumanEval's and LongBench's as DistServe's Figure 7 shows them.
LENGTHS = {
    "sharegpt": Lengths(161, 338),
    "humaneval": Lengths(160, 60, 0.5, 0.6),
    "longbench": Lengths(1700, 90, 0.3, 0.6),
    "fixed-1024": Lengths(1024, 128, 0.0, 0.0),
}


def gamma(
    rates: Sequence[float], cv: float, seconds: float, lengths: Sequence[Lengths], seed: int = 1
) -> list[Request]:
    """Make arrivals with Gamma-distributed gaps of this coefficient of variation: one process for each model.

    Each process begins long before the trace, so that a trace may begin between two bursts.
    """
    _check_count(sum(rates) * seconds)
    shape = 1 / (cv * cv)
    requests = []
    for model, rate in enumerate(rates):
        if rate <= 0:
            continue
        random_ = random.Random(f"{seed} {model}")
        scale = cv * cv / rate
        at = -random_.random() * seconds - scale
        while True:
            at += random_.gammavariate(shape, scale)
            if at >= seconds:
                break
            if at >= 0:
                requests.append(Request(at, model, *lengths[model % len(lengths)].draw(random_)))
    requests.sort()
    return requests


def poisson(rates: Sequence[float], seconds: float, lengths: Sequence[Lengths], seed: int = 1) -> list[Request]:
    """Make memoryless arrivals: MEDUSA §7.5 uses 2 and 10 a second with lengths as in ShareGPT."""
    return gamma(rates, 1.0, seconds, lengths, seed)


def popularity(models: int, rate: float, exponent: float = 0.9) -> list[float]:
    """Divide a rate among models by Zipf's law: a few are asked for often, most of them seldom."""
    weights = [1 / (rank + 1) ** exponent for rank in range(models)]
    total = sum(weights)
    return [rate * weight / total for weight in weights]


def azure(name: str) -> list[Request]:
    """Read one of the two Azure traces of 2023: times from the first request on, all of model 0."""
    if name not in AZURE:
        raise ConfigError(f"expected a trace of {', '.join(AZURE)}, found {name!r}")
    packed = resources.files(__package__).joinpath(f"data/azure_llm_2023_{name.removeprefix('azure-')}.csv.gz")
    text = gzip.decompress(packed.read_bytes()).decode()
    rows = csv.reader(io.StringIO(text))
    next(rows)
    found = [(_moment(at), int(prompt), int(output)) for at, prompt, output in rows]
    begin = found[0][0]
    return [Request(at - begin, 0, max(prompt, 1), max(output, 1)) for at, prompt, output in found]


def assign_models(requests: Iterable[Request], weights: Sequence[float], seed: int = 1) -> Iterator[Request]:
    """Give each request of a trace that names no models one, drawn by these weights."""
    if len(weights) == 1:
        yield from requests
        return
    draw, models, sums = random.Random(seed).choices, range(len(weights)), list(accumulate(weights))
    for request in requests:
        yield request._replace(model=draw(models, cum_weights=sums)[0])


def read_csv(path: Path, models: Sequence[str]) -> list[Request]:
    """Read a trace with the columns timestamp, input_tokens, output_tokens and, for several models, model.

    Timestamps are seconds or dates as in ISO 8601, in UTC where they name no time zone. Raises ConfigError with the
    line for anything else.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin theirs with a mark
            return _parse(csv.DictReader(file), path, models)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the trace {path} could not be read: {why}") from None


def _parse(rows: csv.DictReader[str], path: Path, models: Sequence[str]) -> list[Request]:
    missing = {"timestamp", "input_tokens", "output_tokens"} - set(rows.fieldnames or ())
    if missing:
        raise ConfigError(
            f"{path}: expected the columns timestamp, input_tokens, output_tokens and model, "
            f"found no {', '.join(sorted(missing))}"
        )
    numbers = {name: number for number, name in enumerate(models)}
    found = []
    for line, row in enumerate(rows, 2):
        name = row.get("model") or models[0]
        if name not in numbers:
            raise ConfigError(f"{path}:{line}: the fleet has no model {json_excerpt(name)}")
        try:
            tokens = int(row["input_tokens"]), int(row["output_tokens"])
            at = _moment(row["timestamp"])
            known = math.isfinite(at) and max(map(abs, tokens)) <= _MOST_TOKENS
        except (OSError, OverflowError, ValueError, TypeError):
            known = False
        if not known:
            raise ConfigError(
                f"{path}:{line}: expected a time and two numbers of tokens, found "
                f"{json_excerpt(row['timestamp'])}, {json_excerpt(row['input_tokens'])}, "
                f"{json_excerpt(row['output_tokens'])}"
            )
        found.append((at, numbers[name], *tokens))
    if not found:
        raise ConfigError(f"{path}: expected requests, found none")
    begin = min(at for at, *_ in found)
    return sorted(Request(at - begin, model, max(prompt, 1), max(output, 1)) for at, model, prompt, output in found)


def _check_count(requests: float) -> None:
    """Raise ConfigError for so many requests that they would fill this machine's memory."""
    if not requests <= _MOST_REQUESTS:
        raise ConfigError(f"expected at most {_MOST_REQUESTS} requests (rate x seconds), found {requests:.3g}")


def _moment(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def scale(requests: Sequence[Request], rate: float, seed: int = 1) -> list[Request]:
    """Scale a trace to another mean rate while its shape in time stays (TraceUpscaler).

    Each request is repeated, or left out, so often that the rate of every moment grows alike; copies come in the
    same second as the original, with lengths drawn from the whole trace.
    """
    seconds = max(requests[-1].at_s, 1.0)
    _check_count(rate * seconds)
    factor = rate * seconds / len(requests)
    random_ = random.Random(seed)
    found = []
    for request in requests:
        for number in range(int(factor) + (random_.random() < factor % 1)):
            sizes = random_.choice(requests) if number else request
            at = request.at_s if not number else request.at_s + random_.random()
            found.append(Request(at, request.model, sizes.prompt_tokens, sizes.output_tokens))
    found.sort()
    return found


def window(requests: Iterable[Request], begin_s: float, end_s: float) -> list[Request]:
    """Cut a piece out of a trace. Its times begin at 0."""
    return [request._replace(at_s=request.at_s - begin_s) for request in requests if begin_s <= request.at_s < end_s]


def repeat(requests: Sequence[Request], seconds: float) -> Iterator[Request]:
    """Repeat a trace until so many seconds are full."""
    length = requests[-1].at_s + 1.0
    _check_count(len(requests) * seconds / length)
    for turn in range(math.ceil(seconds / length)):
        for request in requests:
            at = request.at_s + turn * length
            if at >= seconds:
                return
            yield request._replace(at_s=at)
