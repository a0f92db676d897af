"""The measured times of a start's stages on this machine, and a prediction of how long other starts take."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from ..errors import StateError
from ..timeline import Stage

_FORMAT = 1
_NS = 1e9


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """One member of a pipeline group: its bytes a second from the store (b), and into its device (p)."""

    fetch_bytes_per_s: float
    load_bytes_per_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The medians of several starts, in seconds. The symbols in parentheses are ParaServe's (§4.1.2, §5.3).

    container_s: from exec to the fork of the engine's process (t_cc).
    device_s: creating the device's context (t_cu).
    import_s: the imports (t_l).
    prefill_s: the prefill of the measured prompt, without waiting for weights (t_p).
    decode_s: one decode step (t_d).
    weights_bytes: the size of the weights (M).
    load_bytes_per_s: how fast tensors were applied once their bytes were there (p).
    ttft_s: from exec to the first token.
    starts: the number of starts.
    stages: the length of every ``process/stage``.
    fetch_begins_s: from exec to the first request for weights.
    """

    container_s: float
    device_s: float
    import_s: float
    prefill_s: float
    decode_s: float
    weights_bytes: int
    load_bytes_per_s: float
    ttft_s: float
    starts: int
    stages: dict[str, float] = field(default_factory=dict)
    fetch_begins_s: float = 0.0

    def predicted_ttft_s(
        self, workers: Sequence[WorkerRates], *, full_memory: int = 0, waiting_s: float = 0.0, hop_s: float = 0.0
    ) -> float:
        """Predict the TTFT of a pipeline group of these workers by ParaServe's Eq. 5.

        ``full_memory`` of the workers have memory for the whole model, and ``hop_s`` is the network's latency between
        two of them (t_n). A single worker is a group of one. In the paper, the fetch begins with the container; here it
        begins a moment later, when the index has come.
        """
        size, part = len(workers), self.weights_bytes / len(workers)
        slowest = max(
            max(
                self.container_s + self.device_s + max(part / worker.load_bytes_per_s, self.import_s),
                self.fetch_begins_s + part / worker.fetch_bytes_per_s,
            )
            for worker in workers
        )
        computing = self.prefill_s * (size - full_memory + full_memory / size)
        return waiting_s + slowest + computing + hop_s * size

    def predicted_tpot_s(self, size: int, *, full_memory: int = 0, hop_s: float = 0.0) -> float:
        """Predict the TPOT of a pipeline group by ParaServe's Eq. 2. The arguments are as in ``predicted_ttft_s``."""
        return self.decode_s * (size - full_memory + full_memory / size) + hop_s * size

    def to_bytes(self) -> bytes:
        document = {"format": _FORMAT, **asdict(self)}
        if math.isinf(self.load_bytes_per_s):  # nothing is copied; JSON has no infinity
            document["load_bytes_per_s"] = None
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StageTimes:
        """Parse measured times. Raises StateError for any other content."""
        try:
            document = json.loads(data)
            found = document.pop("format")
            if document["load_bytes_per_s"] is None:
                document["load_bytes_per_s"] = math.inf
            times = cls(**document)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(f"expected stage times, found something else ({error}); materialize again") from None
        if found != _FORMAT:
            raise StateError(f"expected stage times of format {_FORMAT}, found another; materialize again")
        times._check()
        return times

    def _check(self) -> None:
        """Check the numbers. Raises StateError unless each of them can be a measurement."""
        numbers = [value for name, value in asdict(self).items() if name != "stages"]
        if isinstance(self.stages, dict):
            numbers += self.stages.values()
        whole = all(type(number) is int for number in (self.weights_bytes, self.starts))
        if not whole or not isinstance(self.stages, dict) or not all(map(_is_measure, numbers)):
            raise StateError("expected stage times of 0 s or more, found something else; materialize again")


def _is_measure(number: object) -> bool:
    """Return whether this can be a measured number. ``inf`` is the rate for weights that are not copied."""
    return (type(number) in (int, float) and 0 <= number < 1e18) or number == math.inf  # type: ignore[operator]


def summarize(starts: Sequence[Sequence[Stage]], decode_s: Sequence[float]) -> StageTimes:
    """Compute the medians of several starts.

    ``starts`` are their timelines, each with a first token, and ``decode_s`` the seconds between later tokens.
    """
    per_start = [_lengths(stages) for stages in starts]
    names = dict.fromkeys(name for lengths in per_start for name in lengths)
    stages = {name: median([lengths.get(name, 0.0) for lengths in per_start]) for name in names}
    weights = max((int(s.detail.get("bytes", 0)) for s in starts[0] if s.name == "fetch"), default=0)
    applying = median([_seconds(found, "apply") for found in starts])
    waiting = median([_seconds(found, "wait") for found in starts])
    return StageTimes(
        container_s=median([_moment(found, "fork", "zygote") - _moment(found, "exec") for found in starts]),
        device_s=stages.get("engine/device", 0.0),
        import_s=stages.get("zygote/import", 0.0),
        prefill_s=max(stages.get("engine/first_forward", 0.0) - waiting, 0.0),
        decode_s=median(decode_s),
        weights_bytes=weights,
        load_bytes_per_s=weights / applying if applying > 0 else float("inf"),
        ttft_s=median([_moment(found, "first_token") - _moment(found, "exec") for found in starts]),
        starts=len(starts),
        stages=stages,
        fetch_begins_s=median([max(_moment(found, "fetch") - _moment(found, "exec"), 0.0) for found in starts]),
    )


def duration_s(stage: Stage) -> float:
    return (stage.end_ns - stage.start_ns) / _NS


def _lengths(stages: Sequence[Stage]) -> dict[str, float]:
    found: dict[str, float] = {}
    for stage in stages:
        if stage.end_ns > stage.start_ns:
            name = f"{stage.process}/{stage.name}"
            found[name] = found.get(name, 0.0) + duration_s(stage)
    return found


def _seconds(stages: Sequence[Stage], name: str) -> float:
    """Return how long all stages of this name took together."""
    return sum(duration_s(stage) for stage in stages if stage.name == name)


def _moment(stages: Sequence[Stage], name: str, process: str | None = None) -> float:
    """Return when a stage began, in seconds. Raises StateError if it did not."""
    for stage in stages:
        if stage.name == name and process in (None, stage.process):
            return stage.start_ns / _NS
    raise StateError(f"expected a timeline with the stage {name}, found none; was the start cut short?")


__all__ = ["StageTimes", "WorkerRates", "summarize"]
