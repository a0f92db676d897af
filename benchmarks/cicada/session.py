"""Samples of several models under several strategies, round by round, until they are enough or the time is over."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from medusa_adapters.bench.result import Result
from medusa_runtime.errors import CorruptError

from benchmarks.cicada import pipeline
from benchmarks.cicada.runner import CONVERTED, Container, Inference, Memory
from benchmarks.cicada.sample import Request

Key = tuple[str, str]  # model, strategy


class Session:
    """Each sample is a cold inference in a fresh process. Every output must be that of eager loading, bit for bit."""

    def __init__(self, folders: Mapping[str, Path], strategies: Sequence[str], scratch: Path, minutes: float) -> None:
        self._folders = folders
        self._strategies = strategies
        self._scratch = scratch
        self._ends = time.monotonic() + minutes * 60
        self._digests: dict[str, str] = {}
        self._round_s: dict[str, float] = {}
        self.timed: dict[Key, list[Inference]] = defaultdict(list)
        self.watched: dict[Key, list[Inference]] = defaultdict(list)

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def round(self, number: int, *, watch: bool = False) -> None:
        """One sample of each strategy and model; of a model for which there is no time left, none but the first."""
        for model in self._folders:
            if model in self._round_s and self._round_s[model] > self.left_s:
                say(f"{model}: round {number + 1} is left out, the time is over")
                continue
            began = time.monotonic()
            strategies = [name for name in self._strategies if self._url(model, name).exists()]
            for strategy in strategies if number % 2 == 0 else strategies[::-1]:
                found = self._infer(model, strategy, watch=watch)
                (self.watched if watch else self.timed)[model, strategy].append(found)
            self._round_s[model] = time.monotonic() - began

    def _infer(self, model: str, strategy: str, *, watch: bool) -> Inference:
        if model not in self._digests:
            self._digests[model] = self._sample(model, "sequential", watch=False).digest
        found = self._sample(model, strategy, watch=watch)
        if found.digest != self._digests[model]:
            raise CorruptError(f"{model}/{strategy}: the output is not that of eager loading, bit for bit")
        memory = f", {found.memory.used_mb:,.0f} MB used" if found.memory else ""
        say(f"  {model}/{strategy}: {found.seconds:.3f} s{memory}")
        return found

    def _sample(self, model: str, strategy: str, *, watch: bool) -> Inference:
        with Container(self._scratch, strategy) as container:
            container.wait_ready()
            return container.infer(Request(model, strategy, str(self._url(model, strategy))), watch=watch)

    def _url(self, model: str, strategy: str) -> Path:
        folder = self._folders[model]
        return folder / CONVERTED if strategy == "converted" else folder

    def add_rows(self, result: Result) -> None:
        for (model, strategy), timed in self.timed.items():
            name, watched = f"{model}/{strategy}", self.watched[model, strategy]
            result.add(name, "latency_s", "s", [one.seconds for one in timed])
            for metric in Memory._fields:
                result.add(name, metric, "MB", [getattr(one.memory, metric) for one in watched])
            if strategy == "floor":  # a forward, and no pipeline
                continue
            result.add(name, "utilisation", "of 1", [pipeline.utilisation(one.stages) for one in timed])
            for metric in pipeline.Totals._fields:
                result.add(name, metric, "s", [getattr(pipeline.totals(one.stages), metric) for one in timed])
            for unit, label in pipeline.NAMES.items():
                for kind, seconds in (("working", pipeline.working), ("waiting", pipeline.waiting)):
                    found = [seconds(one.stages).get(unit) for one in timed]
                    result.add(name, f"{label}_{kind}_s", "s", [one for one in found if one is not None])

    def draw(self, folder: Path) -> None:
        """The timeline of each model's middle sample under each strategy, as SVG and PNG."""
        from benchmarks.cicada.figure import draw

        folder.mkdir(parents=True, exist_ok=True)
        for model in self._folders:
            samples = {name: sorted(self.timed[model, name]) for name in self._strategies if self.timed[model, name]}
            middle = {strategy: found[len(found) // 2].stages for strategy, found in samples.items()}
            for ending in ("svg", "png"):
                draw(model, middle, folder / f"{model}.{ending}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
