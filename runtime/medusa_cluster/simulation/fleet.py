"""The simulated fleet: its machines and models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .profiles import Profile

GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Machine:
    """A number of equal machines.

    ``link_bytes_per_s`` holds in each direction, and ``store_bytes_per_s`` for reading from the store or a disk.
    """

    name: str
    count: int
    link_bytes_per_s: float
    devices: int = 1
    device: str = ""  # kind
    memory_bytes: int = 0  # for weights
    store_bytes_per_s: float = math.inf
    leaf: str = ""
    fast_domain_size: int = 1  # so many of them share a fast link
    fast_bytes_per_s: float = math.inf
    device_bytes: int = 0  # memory of each device; 0: large enough


@dataclass(frozen=True, slots=True)
class Model:
    """A deployed model. ``profile`` has its times on its device, and ``others`` those on other kinds of devices."""

    name: str
    profile: Profile
    device: str = ""  # it starts on these only; "": on any
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf
    min: int = 0
    max: int = 1_000_000
    concurrency: int = 8
    tokens_per_s: float = 0.0  # prompts that one instance bears; 0: only requests count
    disaggregated: bool = False
    shared_queue: bool = False  # idle instances take prompts from it (BlitzScale's code); else each has its own
    prompt_tokens: float = 512.0  # typical, for predictions
    batch_tokens: int = 8192  # prompts that are prefilled together
    others: tuple[tuple[str, Profile], ...] = ()

    def on(self, device: str) -> Profile:
        """Return the model's times on a kind of device."""
        return next((profile for kind, profile in self.others if kind == device), self.profile)


@dataclass(frozen=True, slots=True)
class Fleet:
    name: str
    machines: tuple[Machine, ...]
    models: tuple[Model, ...]
    hop_s: float = 0.001  # between two workers of a group
    store_bytes_per_s: float = math.inf  # of all nodes together
    start_spread: float = 0.0  # sigma of the log-normal factor by which each start is slower or faster
    prefill_spread: float = 0.0  # the same of each prefill

    @property
    def devices(self) -> int:
        return sum(machine.count * machine.devices for machine in self.machines)
