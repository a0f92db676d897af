"""Strategies: serving systems as sets of parts that can be switched on and off one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from medusa_runtime.errors import ConfigError
from medusa_runtime.state.stage_times import StageTimes

from ..policy.decide import Options
from ..policy.scaling import Bounds
from .profiles import GB, Profile


@dataclass(frozen=True, slots=True)
class Strategy:
    """A serving system: the way in which it starts instances, keeps weights, and decides.

    - ``prefetch``: the fetch begins with the container, not after it.
    - ``stream``: tensors are loaded as they arrive, into an engine that skips profiling.
    - ``overlap``: loading runs beside the imports.
    - ``precreated``: containers exist already.
    - ``warm``: processes that have imported everything exist already.
    - ``direct``: weights from the network arrive in the device, not in the host's memory (BlitzScale).
    - ``cache``: which models nodes keep in host memory after an instance has ended: none, by least recent use, or all.
    - ``caches_groups``: copies that began as a part of a model, for a worker of a group, are kept as well. ParaServe's
      published code keeps only those that one worker fetched.
    - ``provisioned``: the part of the devices that always serves, instead of scaling.
    """

    name: str
    prefetch: bool = True
    stream: bool = True
    overlap: bool = True
    precreated: bool = False
    warm: bool = False
    direct: bool = False
    loader: bool = False  # ServerlessLLM's checkpoint format, without the other optimizations
    cache: str = "none"  # none | lru | all
    caches_groups: bool = True
    cache_ttl_s: float = float("inf")
    provisioned: float | None = None
    policy: Options = field(default_factory=Options)

    def boot_s(self, profile: Profile, part_bytes: float) -> float:
        """Return the seconds from the start until the weights are needed, or with ``stream`` until they are loaded."""
        stages = profile.stages
        if self.warm:
            return 0.0
        before = (0.0 if self.precreated else stages.container_s) + stages.device_s
        if self.stream and self.overlap:
            return before + max(part_bytes / stages.load_bytes_per_s, stages.import_s)
        if self.stream:
            return before + stages.import_s + part_bytes / stages.load_bytes_per_s
        return before + stages.import_s

    def init_s(self, profile: Profile) -> float:
        """Return the seconds from when the engine is booted and the weights fetched until it is ready."""
        stages, size = profile.stages, profile.size_bytes / GB
        if self.stream:
            return stages.init_s + stages.init_s_per_gb * size
        if self.loader:
            return stages.loader_init_s + stages.loader_init_s_per_gb * size
        return stages.plain_init_s + stages.plain_init_s_per_gb * size + profile.size_bytes / stages.load_bytes_per_s

    def times(self, profile: Profile, prompt_tokens: float) -> StageTimes:
        """Return the stage times that the policy predicts with."""
        stages = profile.stages
        return StageTimes(
            container_s=0.0 if self.precreated or self.warm else stages.container_s,
            device_s=0.0 if self.warm else stages.device_s,
            import_s=0.0 if self.warm else stages.import_s,
            prefill_s=self.init_s(profile) + profile.speed.prefill(prompt_tokens),
            decode_s=profile.speed.decode(1),
            weights_bytes=profile.size_bytes,
            load_bytes_per_s=stages.load_bytes_per_s,
            ttft_s=0.0,
            starts=1,
        )


_ALONE = Options(pool=False, from_peers=False, forwarding=False, turn_s=None)  # no paper's models take turns
_FIRST_FIT = replace(_ALONE, contention_aware=False)

# ParaServe's systems, BlitzScale's, and ours, which is both. The parts in between are the steps of the papers' figures.
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "medusa",
            warm=True,
            cache="lru",
            policy=Options(largest_group=4, live=True),
        ),
        Strategy("single", policy=_ALONE),
        Strategy("paraserve", policy=replace(_ALONE, largest_group=4)),
        Strategy("paraserve-cache", cache="lru", caches_groups=False, policy=replace(_ALONE, largest_group=4)),
        Strategy("vllm", prefetch=False, stream=False, overlap=False, policy=_FIRST_FIT),
        Strategy("vllm+prefetch", stream=False, overlap=False, policy=_FIRST_FIT),
        Strategy("vllm+stream", overlap=False, policy=_FIRST_FIT),
        Strategy("vllm+overlap", policy=_FIRST_FIT),
        Strategy(
            "serverlessllm",
            prefetch=False,
            stream=False,
            overlap=False,
            precreated=True,
            loader=True,
            cache="lru",
            policy=_FIRST_FIT,
        ),
        Strategy("s-llm", warm=True, cache="lru", cache_ttl_s=300.0, policy=_ALONE),
        Strategy("allcache", warm=True, cache="all", policy=_ALONE),
        Strategy(
            "s-llm+network",
            warm=True,
            direct=True,
            policy=replace(_ALONE, pool=True, from_peers=True, from_devices=True),
        ),
        Strategy("s-llm+multicast", warm=True, direct=True, policy=Options(from_devices=True, turn_s=None)),
        Strategy("blitzscale", warm=True, direct=True, policy=Options(live=True, from_devices=True, turn_s=None)),
        Strategy("full", warm=True, cache="all", provisioned=1.0, policy=_ALONE),
        Strategy("half", warm=True, cache="all", provisioned=0.5, policy=_ALONE),
    )
}


def strategy_named(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise ConfigError(f"expected a strategy of {', '.join(STRATEGIES)}, found {name!r}")
    return STRATEGIES[name]


def with_bounds(strategy: Strategy, bounds: Bounds) -> Strategy:
    return replace(strategy, policy=replace(strategy.policy, bounds=bounds))
