"""The metrics of a gateway, in Prometheus' text format (exposition format 0.0.4)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

from medusa_runtime.prometheus import SECONDS, TOKEN_SECONDS, Histogram, Labels, gauge

_RATE_S = 2.0  # the window over which tokens per second are counted
_TOKENS_PER_BYTE = 0.25  # of a prompt's text, until the answers have shown it
_NEWEST = 0.2  # the weight of the newest answer in the moving averages of bytes and tokens
_TYPICAL_BYTES = 1000.0  # of a prompt, until there are answers

Gauges = Mapping[str, Mapping[str, float]]


class Rate:
    """The rate per second of something that is counted, over the last ``window_s``."""

    def __init__(self, window_s: float = _RATE_S) -> None:
        self._window_s = window_s
        self._noted: deque[tuple[float, int]] = deque()
        self._sum = 0

    def note(self, count: int) -> None:
        now = time.monotonic()
        self._noted.append((now, count))
        self._sum += count
        self._forget_before(now - self._window_s)

    def per_s(self) -> float:
        self._forget_before(time.monotonic() - self._window_s)
        return self._sum / self._window_s

    def _forget_before(self, start: float) -> None:
        while self._noted and self._noted[0][0] < start:
            self._sum -= self._noted.popleft()[1]


class ModelMetrics:
    """The metrics of one model."""

    def __init__(self, model: str) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.retries: Counter[str] = Counter()
        self.shed = 0
        self.cancelled = 0
        self.tokens = 0
        labels = (("model", model),)
        self.ttft = Histogram(
            "medusa_gateway_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            SECONDS,
            labels,
        )
        self.tpot = Histogram(
            "medusa_gateway_time_per_output_token_seconds",
            "Between tokens after the first, one value a request.",
            TOKEN_SECONDS,
            labels,
        )
        self.token_rate = Rate()  # generated tokens
        self.arrived = Rate()  # prompt tokens of requests that arrive, estimated
        self.prefilled = Rate()  # prompt tokens of requests whose first token has come
        self.unanswered_tokens = 0  # of prompts under way without a first token; a whole answer has none until its end
        self._mean_bytes, self._mean_tokens = _TYPICAL_BYTES, _TYPICAL_BYTES * _TOKENS_PER_BYTE
        self.finished = Rate(10.0)

    def generated(self, count: int) -> None:
        self.tokens += count
        self.token_rate.note(count)

    def prompt_tokens(self, ids: int, text_bytes: int) -> int:
        """Estimate the tokens of a prompt with so many token ids and bytes of text. The gateway has no tokenizer."""
        if not text_bytes:
            return ids
        per_byte = min(self._mean_tokens / self._mean_bytes, 1.0)  # a template has tokens without text
        return ids + round(self._mean_tokens + per_byte * (text_bytes - self._mean_bytes))

    def learn(self, text_bytes: int, tokens: int) -> None:
        """Learn from an answer how many tokens a prompt's text had."""
        if text_bytes and tokens > 0:
            self._mean_bytes += _NEWEST * (text_bytes - self._mean_bytes)
            self._mean_tokens += _NEWEST * (tokens - self._mean_tokens)


class Metrics:
    """The metrics of all models. Requests for a model that is not deployed are counted under an empty name."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(model)
        return found

    def forget(self, deployed: set[str]) -> None:
        """Drop models that are no longer deployed, so that the names do not pile up."""
        for name in set(self._models) - deployed - {""}:
            del self._models[name]

    def text(self, gauges: Gauges) -> str:
        """Return all metrics as text. ``gauges``: name of a gauge → model → value."""
        return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Gauges) -> Iterator[str]:
        models = sorted(self._models.items())
        yield from _gauge(
            "requests_total",
            "Requests by route and status; 499: the client left.",
            (
                ((("model", name), ("route", route), ("status", str(status))), count)
                for name, found in models
                for (route, status), count in sorted(found.requests.items())
            ),
        )
        yield from _gauge(
            "retries_total",
            "Runs of a request after the first one, by the reason.",
            (
                ((("model", name), ("reason", reason)), count)
                for name, found in models
                for reason, count in sorted(found.retries.items())
            ),
        )
        for metric, text, values in (
            ("shed_total", "Requests refused because too many waited.", {name: found.shed for name, found in models}),
            ("cancelled_total", "Requests whose client left.", {name: found.cancelled for name, found in models}),
            ("tokens_total", "Tokens sent to clients.", {name: found.tokens for name, found in models}),
            *((metric, metric.replace("_", " ").capitalize() + ".", values) for metric, values in gauges.items()),
        ):
            yield from _gauge(metric, text, (((("model", name),), value) for name, value in sorted(values.items())))
        if models:
            _, (first, *others) = zip(*models, strict=True)
            yield from first.ttft.lines(*(other.ttft for other in others))
            yield from first.tpot.lines(*(other.tpot for other in others))


def _gauge(name: str, text: str, samples: Iterable[tuple[Labels, float]]) -> Iterable[str]:
    return gauge(f"medusa_gateway_{name}", text, *samples)
