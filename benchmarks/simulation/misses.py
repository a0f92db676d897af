"""How often a host's cache lacks a model that is to start there: BlitzScale's Figure 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from medusa_cluster.simulation.fleet import GBIT, Fleet, Machine, Model
from medusa_cluster.simulation.profiles import GB, PROFILES
from medusa_cluster.simulation.result import Outcome, mean
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named, with_bounds
from medusa_cluster.simulation.trace import Request, assign_models, azure, popularity, scale, window
from medusa_runtime.container_limits import cpu_count

from benchmarks.simulation.blitzscale import BOUNDS, CASES
from benchmarks.simulation.figure import Figure, Line, Order, chart

_HOSTS = 16  # with one instance each
_MODELS = (1, 4, 16)
_LONGEST_S = 1800.0
_RUNS = (*(("s-llm", models) for models in _MODELS), ("blitzscale", _MODELS[-1]))
_KEPT_S = 300.0  # §3: caches live for five minutes
_COUNTED_PER_S, _TIMES = 13_000, 4  # the published script: prompt tokens of an instance, and of the trace
_PROFILE = "llama3-8b@a800"
_UNIT = "% of starts"


def counted(requests: Sequence[Request]) -> float:
    """Return the percentage of misses as the published script counts them.

    A second needs so many instances for its prompt tokens. Those that are more than in the second before are started,
    and those that are more than in any second of the last five minutes find no copy.
    """
    tokens: dict[int, int] = {}
    for request in requests:
        tokens[int(request.at_s)] = tokens.get(int(request.at_s), 0) + _TIMES * request.prompt_tokens
    needed = {at: math.ceil(count / _COUNTED_PER_S) for at, count in sorted(tokens.items())}
    started = missed = before = 0
    for at, count in needed.items():
        if before and count > before:
            most = max(needed.get(second, 0) for second in range(at - int(_KEPT_S) + 1, at))
            started += count - before
            missed += max(count - most, 0)
        before = count
    return 100 * missed / started if started else 0.0


def part(system: str, trace: str, models: int, seconds: float) -> Outcome:
    """Simulate the first part of a trace.

    Its requests are for ``models`` models of 8B, which are popular by Zipf's law with exponent 1.
    """
    case, found = CASES[trace], window(azure(trace), 0.0, seconds)
    tokens = mean([request.prompt_tokens for request in found])
    asked = scale(found, 0.25 * _HOSTS * CASES["azure-code"].capacity / tokens)
    strategy = with_bounds(strategy_named(system), BOUNDS)
    if math.isfinite(strategy.cache_ttl_s):
        strategy = replace(strategy, cache_ttl_s=_KEPT_S)
    strategy = replace(strategy, policy=replace(strategy.policy, ends_starts=False))
    machine = Machine("host", _HOSTS, 100 * GBIT, memory_bytes=1000 * GB, store_bytes_per_s=10 * GBIT)
    deployed = tuple(
        Model(
            f"m{number}",
            PROFILES[_PROFILE],
            ttft_slo_s=case.slo_s,
            tokens_per_s=CASES["azure-code"].capacity,
            concurrency=CASES["azure-code"].concurrency,
            batch_tokens=4096,
        )
        for number in range(models)
    )
    requests = assign_models(asked, popularity(models, 1.0, 1.0))
    return Simulation(Fleet("misses", (machine,), deployed), strategy, requests, tick_s=0.1).run()


def missed(outcome: Outcome) -> float:
    """Return the percentage of starts for which the weights were read from the disk."""
    read = outcome.store_bytes / PROFILES[_PROFILE].size_bytes
    return 100 * read / outcome.cold_starts if outcome.cold_starts else 0.0


def figure_4(seconds: float) -> Figure:
    most, seconds = _MODELS[-1], min(seconds, _LONGEST_S)
    runs = [(system, trace, models) for trace in CASES for system, models in _RUNS]
    with ProcessPoolExecutor(cpu_count()) as pool:
        outcomes = dict(zip(runs, pool.map(part, *zip(*runs, strict=True), [seconds] * len(runs)), strict=True))
    by_script = {trace: counted(window(azure(trace), 0.0, seconds)) for trace in CASES}
    found = [
        Line(f"{trace}, counted as in the published script", percent, None, _UNIT)
        for trace, percent in by_script.items()
    ]
    for (system, trace, models), outcome in outcomes.items():
        name = f"{trace}, {system}, {models} model{'s' * (models > 1)}"
        published = (20.0, 46.0) if system == "s-llm" and models > 1 else None
        found.append(Line(f"{name}: starts", float(outcome.cold_starts), None, ""))
        found.append(Line(f"{name}: of them read from a disk", missed(outcome), published, _UNIT))
    series = {
        trace: [(float(models), missed(outcomes["s-llm", trace, models])) for models in _MODELS] for trace in CASES
    }
    orders = [
        Order(
            f"{trace}, {most} models, order",
            {system: missed(outcomes[system, trace, most]) for system in ("blitzscale", "s-llm")},
        )
        for trace in CASES
    ]
    return Figure(
        "blitzscale-4",
        "BlitzScale Figure 4: starts on hosts whose cache lacks the model",
        chart(series, f"models on {_HOSTS} hosts", "% of S-LLM's starts read from a disk", 100),
        found,
        "The paper has BurstGPT, whose bursts grow over those of the last five minutes, for which caches live. Its "
        "script counts one model, with a cache that any instance finds. By that count our traces have few misses. "
        "With several models each is on few hosts, and a start is often elsewhere: this the simulation shows, so its "
        "numbers are not to be compared one by one. A model is drawn for each request. The first half hour of the "
        "traces. BlitzScale reads nothing from disks: another host has the weights.",
        orders,
    )
