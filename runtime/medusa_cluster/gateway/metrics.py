"""The numbers of a gateway, in Prometheus' text format (exposition format 0.0.4)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_RATE_S = 2.0  # over which tokens per second are counted
_TOKENS_PER_BYTE = 0.25  # of a prompt's text, until an answer has told
_NEWEST = 0.2  # its share in what is learned of that

Gauges = Mapping[str, Mapping[str, float]]


class Histogram:
    """Observations in buckets."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, name: str, labels: str) -> Iterator[str]:
        seen = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {seen}'
        yield f"{name}_sum{{{labels}}} {self._sum:.6f}"
        yield f"{name}_count{{{labels}}} {seen}"


class Rate:
    """How often something happened in the last seconds."""

    def __init__(self, window_s: float = _RATE_S) -> None:
        self._window_s = window_s
        self._noted: deque[tuple[float, int]] = deque()
        self._sum = 0

    def note(self, count: int) -> None:
        self._noted.append((time.monotonic(), count))
        self._sum += count

    def per_s(self) -> float:
        start = time.monotonic() - self._window_s
        while self._noted and self._noted[0][0] < start:
            self._sum -= self._noted.popleft()[1]
        return self._sum / self._window_s


class ModelMetrics:
    """The numbers of one model."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.retries: Counter[str] = Counter()
        self.shed = 0
        self.cancelled = 0
        self.tokens = 0
        self.ttft = Histogram(_SECONDS)
        self.tpot = Histogram(_TOKEN_SECONDS)
        self.token_rate = Rate()  # generated
        self.arrived = Rate()  # tokens of prompts, estimated
        self.prefilled = Rate()  # those of prompts whose first token has come
        self._tokens_per_byte = _TOKENS_PER_BYTE
        self.finished = Rate(10.0)

    def generated(self, count: int) -> None:
        self.tokens += count
        self.token_rate.note(count)

    def prompt_tokens(self, ids: int, text_bytes: int) -> int:
        """Estimate the tokens of a prompt of so many ids and bytes of text; it is tokenized elsewhere."""
        return ids + round(text_bytes * self._tokens_per_byte)

    def learn(self, text_bytes: int, tokens: int) -> None:
        """Learn how many tokens a prompt's text had."""
        if text_bytes and tokens > 0:
            self._tokens_per_byte += _NEWEST * (tokens / text_bytes - self._tokens_per_byte)


class Metrics:
    """The numbers of all models. Requests for a model that is not deployed are counted under an empty name."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        return self._models.setdefault(model, ModelMetrics())

    def forget(self, deployed: set[str]) -> None:
        """Drop models that are no longer deployed, so that names do not add up for ever."""
        for name in set(self._models) - deployed - {""}:
            del self._models[name]

    def text(self, gauges: Gauges) -> str:
        """All of them, and ``gauges``: values by model, under the gauge's name."""
        return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Gauges) -> Iterator[str]:
        models = sorted(self._models.items())
        yield from _head("requests_total", "counter", "Requests by route and status; 499: the client left.")
        for name, found in models:
            for (route, status), count in sorted(found.requests.items()):
                labels = f'model="{escaped(name)}",route="{escaped(route)}",status="{status}"'
                yield f"medusa_gateway_requests_total{{{labels}}} {count}"
        yield from _head("retries_total", "counter", "Runs of a request after the first one, by the reason.")
        for name, found in models:
            for reason, count in sorted(found.retries.items()):
                yield f'medusa_gateway_retries_total{{model="{escaped(name)}",reason="{reason}"}} {count}'
        for metric, text, attribute in (
            ("shed_total", "Requests refused because too many waited.", "shed"),
            ("cancelled_total", "Requests whose client left.", "cancelled"),
            ("tokens_total", "Tokens sent to clients.", "tokens"),
        ):
            yield from _head(metric, "counter", text)
            for name, found in models:
                yield f'medusa_gateway_{metric}{{model="{escaped(name)}"}} {getattr(found, attribute)}'
        for metric, values in gauges.items():
            yield from _head(metric, "gauge", metric.replace("_", " ").capitalize() + ".")
            for name, value in sorted(values.items()):
                yield f'medusa_gateway_{metric}{{model="{escaped(name)}"}} {value:g}'
        for metric, text, attribute in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", "ttft"),
            ("time_per_output_token_seconds", "Between tokens after the first, one value a request.", "tpot"),
        ):
            yield from _head(metric, "histogram", text)
            for name, found in models:
                histogram: Histogram = getattr(found, attribute)
                yield from histogram.samples(f"medusa_gateway_{metric}", f'model="{escaped(name)}"')


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP medusa_gateway_{name} {text}"
    yield f"# TYPE medusa_gateway_{name} {kind}"


def escaped(value: str) -> str:
    """A label's value as the format wants it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
