"""The times of models on the papers' devices.

Stage constants are fitted to the plotted cold starts of ParaServe's Figure 8 (within 15 %), warm times are its Table 1.
BlitzScale's prefill rates are those of its code. ``docs/internals/simulation.md`` has the fit beside the published
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

GB = 10**9


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a start, before any weights are needed and after they have come.

    ``init_s`` and ``init_s_per_gb`` are for an engine that skips profiling and takes tensors as they arrive (ParaServe
    §7), ``plain_…`` for stock vLLM, which fills a dummy model first, and ``loader_…`` for ServerlessLLM. ``end_s`` is
    the time from the order to end an idle instance until its device is free.
    """

    container_s: float = 1.4
    device_s: float = 0.5
    import_s: float = 1.5
    load_bytes_per_s: float = 17e9
    init_s: float = 0.3
    init_s_per_gb: float = 0.13
    plain_init_s: float = 2.0
    plain_init_s_per_gb: float = 0.36
    loader_init_s: float = 4.0
    loader_init_s_per_gb: float = 0.172
    end_s: float = 0.0


class Speed(Protocol):
    """How fast a device computes: the seconds of a prefill of n tokens together, and of one decode step of a batch."""

    def prefill(self, tokens: float) -> float: ...

    def decode(self, batch: float) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearSpeed:
    """A speed whose prefills and decode steps are linear in tokens and sequences (BlitzScale §5.4)."""

    prefill_s: float
    prefill_s_per_token: float
    decode_s: float
    decode_s_per_sequence: float

    def prefill(self, tokens: float) -> float:
        return self.prefill_s + self.prefill_s_per_token * tokens

    def decode(self, batch: float) -> float:
        return self.decode_s + self.decode_s_per_sequence * batch


@dataclass(frozen=True, slots=True)
class SlowerSpeed:
    """Another speed, so many times slower."""

    speed: Speed
    factor: float

    def prefill(self, tokens: float) -> float:
        return self.factor * self.speed.prefill(tokens)

    def decode(self, batch: float) -> float:
        return self.factor * self.speed.decode(batch)


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on a device."""

    size_bytes: int
    layers: int
    stages: Stages
    speed: Speed


A10 = Stages()
V100 = Stages(
    container_s=1.4,
    device_s=0.7,
    import_s=1.7,
    load_bytes_per_s=11e9,
    init_s=1.7,
    init_s_per_gb=0.14,
    plain_init_s=2.8,
    plain_init_s_per_gb=0.81,
    loader_init_s=6.3,
    loader_init_s_per_gb=0.256,
)
# BlitzScale keeps contexts and processes; only weights move (its §A): 128 Gb/s from host to device.
A800 = Stages(0.0, 0.0, 0.0, 16e9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
# MEDUSA §7.5: a pool of warm environments, so that a start is the loading phase.
A100 = Stages(0.0, 0.0, 0.0, 16e9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _speed(ttft_s: float, tpot_s: float) -> LinearSpeed:
    """Return the speed by ParaServe's Table 1, for 8 sequences of 1024 tokens.

    Four fifths of a decode step are taken as the reading of the weights.
    """
    return LinearSpeed(0.05, (ttft_s - 0.05) / 8192, 0.8 * tpot_s, 0.2 * tpot_s / 8)


def _rate(tokens_per_s: float, decode_s: float) -> LinearSpeed:
    """Return the speed by BlitzScale's prefill capacity."""
    return LinearSpeed(0.02, 1 / tokens_per_s, 0.8 * decode_s, 0.2 * decode_s / 32)


PROFILES: dict[str, Profile] = {
    "opt-2.7b@a10": Profile(int(5.3 * GB), 32, A10, _speed(0.65, 0.02)),
    "llama2-7b@a10": Profile(int(12.5 * GB), 32, A10, _speed(1.5, 0.042)),
    "llama3-8b@a10": Profile(int(16.0 * GB), 32, A10, _speed(1.7, 0.046)),
    "llama2-7b@v100": Profile(int(12.5 * GB), 32, V100, _speed(1.3, 0.034)),
    "opt-13b@v100": Profile(int(24.0 * GB), 40, V100, _speed(2.4, 0.058)),
    "llama2-13b@v100": Profile(int(24.2 * GB), 40, V100, _speed(2.4, 0.058)),
    "llama3-8b@a800": Profile(16 * GB, 32, A800, _rate(12_000, 0.03)),
    "mistral-24b@a800x2": Profile(48 * GB, 40, replace(A800, load_bytes_per_s=32e9), _rate(6_000, 0.04)),
    "qwen2.5-72b@a800x4": Profile(144 * GB, 80, replace(A800, load_bytes_per_s=64e9), _rate(7_500, 0.05)),
    "llama2-7b@a100": Profile(int(13.5 * GB), 32, A100, _rate(12_000, 0.025)),
    "qwen1.5-4b@a100": Profile(int(7.9 * GB), 40, A100, _rate(18_000, 0.018)),
}
