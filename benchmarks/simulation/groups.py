"""ParaServe's figures of single groups: what their size costs (5), scaling down (13), and functions apart (15)."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf
from random import Random

from medusa_cluster.simulation.fleet import GBIT, Fleet, Machine, Model
from medusa_cluster.simulation.profiles import GB, PROFILES, Profile
from medusa_cluster.simulation.result import Outcome, mean
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import Strategy, strategy_named, with_bounds
from medusa_cluster.simulation.trace import LENGTHS, Request, gamma
from medusa_runtime.state.stage_times import StageTimes, WorkerRates

from benchmarks.simulation.figure import Figure, Line, Order, bars, chart

_LINK = 16 * GBIT
_HOP_S = 0.0005
_SIZES = (1, 2, 3, 4)
_ANSWER = 512  # tokens of Figure 13
_FUNCTION_LINK = 5 * GBIT  # §8.5
_STORE_HOPS_S = (0.005, 0.02, 0.05, 0.1)  # a put and a get of an object; the paper does not say how long they take
_ASSUMED_HOP_S = 0.05
_GRACE_S = 300.0
_SEEDS = (1, 2, 3)
_FUNCTIONS = 24  # models; their rates are as unequal as Azure's functions, log-normal with this sigma
_SIGMA = 3.04
_WAIT_S = 1.0  # for the controller's tick; less than a group of three would take longer
_WARM_S = 3.0  # a first token that comes within this time has not waited for a start


class _Sized(Strategy):
    """A strategy whose predictions leave out all that a larger group does not shorten, so that SLOs choose its size."""

    def times(self, profile: Profile, prompt_tokens: float) -> StageTimes:
        found = Strategy.times(self, profile, prompt_tokens)
        prefill_s = profile.speed.prefill(prompt_tokens)
        return replace(found, container_s=0.0, device_s=0.0, import_s=0.0, prefill_s=prefill_s, load_bytes_per_s=inf)


def _sized(strategy: Strategy) -> _Sized:
    return _Sized(**{one.name: getattr(strategy, one.name) for one in fields(strategy)})


def start(
    profile: Profile,
    strategy: Strategy,
    size: int,
    tokens: int,
    *,
    full: int,
    follows_memory: bool,
    link_bytes_per_s: float = _LINK,
    hop_s: float = _HOP_S,
) -> Outcome:
    """Start a model by a group of so many workers, ``full`` of them with memory for all of it, for one request.

    The SLOs of the model are such that the policy chooses this group.
    """
    policy = replace(
        strategy.policy, largest_group=size, follows_memory=follows_memory, contention_aware=True, hop_s=hop_s
    )
    strategy = _sized(replace(strategy, policy=policy))
    times = strategy.times(profile, 512)
    workers = [WorkerRates(link_bytes_per_s, times.load_bytes_per_s)] * size
    computing = full if follows_memory else size
    hop = hop_s if size > 1 else 0.0
    ttft_slo = times.predicted_ttft_s(workers, full_memory=computing, hop_s=hop) + 1e-6
    tpot_slo = times.predicted_tpot_s(size, full_memory=computing, hop_s=hop) + 1e-6
    machines = (Machine("n", 4, link_bytes_per_s, memory_bytes=188 * GB),)
    model = Model("m", profile, ttft_slo_s=ttft_slo, tpot_slo_s=tpot_slo)
    fleet = Fleet("groups", machines, (model,), hop_s=hop_s)
    return Simulation(fleet, strategy, [Request(0.0, 0, 512, tokens)]).run()


def _workers(size: int) -> str:
    return f"{size} worker{'s' * (size > 1)}"


def figure_5(seconds: float) -> Figure:
    del seconds
    found, orders = [], []
    series: dict[str, list[tuple[float, float]]] = {}
    sequential = strategy_named("vllm")
    for name in ("opt-2.7b@a10", "llama2-7b@a10", "llama3-8b@a10"):
        ttft = {
            size: start(PROFILES[name], sequential, size, 8, full=size, follows_memory=False).ttft_s[0]
            for size in _SIZES
        }
        series[name] = [(float(size), value) for size, value in ttft.items()]
        found += [Line(f"{name}, {_workers(size)}: TTFT", value, None, "s") for size, value in ttft.items()]
        orders.append(Order(f"{name}: TTFT, order", {_workers(size): ttft[size] for size in reversed(_SIZES)}))
    profile, group = PROFILES["llama2-7b@a10"], strategy_named("paraserve")

    def tpot_ms(size: int, full: int) -> float:
        return 1000 * start(profile, group, size, 8, full=full, follows_memory=True).tpot_s[0]

    parts = {size: tpot_ms(size, 1) for size in _SIZES}
    whole = {1: parts[4]} | {full: tpot_ms(4, full) for full in _SIZES[1:]}
    found += [Line(f"{_workers(size)}, 1 with all of the memory: TPOT", one, None, "ms") for size, one in parts.items()]
    found += [Line(f"4 workers, {full} with all of the memory: TPOT", whole[full], None, "ms") for full in _SIZES[1:]]
    found.append(Line("4 workers with all of the memory over one: TPOT", whole[4] / parts[1], 1.0, "×"))
    orders.append(Order("TPOT by workers, order", {_workers(size): one for size, one in parts.items()}))
    more = {f"{full} with all of the memory": whole[full] for full in reversed(_SIZES)}
    orders.append(Order("TPOT of 4 workers by memory, order", more))
    return Figure(
        "paraserve-5",
        "ParaServe Figure 5: what a group's size and its workers' memory cost and bring",
        chart(series, "workers", "TTFT without overlapped stages, s"),
        found,
        "The paper plots without numbers, and calls what four workers lose with all of the memory negligible. Workers "
        "with a part of the memory have a part of the computing power (follows_memory), as where GPUs are shared. At "
        "least one has all of it here, as in the published code: it is the one that goes on alone.",
        orders,
    )


def figure_13(seconds: float) -> Figure:
    del seconds
    found, ratios = [], {}
    for full, published in ((1, 2.29), (4, None)):
        short, down = (
            start(PROFILES["llama2-13b@v100"], strategy_named("paraserve"), 4, tokens, full=full, follows_memory=True)
            for tokens in (8, _ANSWER)
        )
        stay_s = short.ttft_s[0] + (_ANSWER - 1) * short.tpot_s[0]
        down_s = down.ttft_s[0] + (_ANSWER - 1) * down.tpot_s[0]
        name = f"{full} of four workers with all of the memory"
        ratios[name] = stay_s / down_s
        found += [
            Line(f"{name}, 512 tokens as a group", stay_s, None, "s"),
            Line(f"{name}, 512 tokens with scaling down", down_s, None, "s"),
            Line(f"{name}: times as fast with scaling down", ratios[name], published, "×"),
        ]
    return Figure(
        "paraserve-13",
        "ParaServe Figure 13: one answer of 512 tokens with and without scaling down",
        bars(ratios, "times as fast"),
        found,
        "Llama2 13B by four V100s. Without scaling down, the group goes on as fast as for its first tokens. Where each "
        "worker has a whole device, there is hardly anything to gain: that is how it is here (One instance a GPU).",
        [Order("times as fast, order", dict(reversed(ratios.items())))],
    )


def functions(system: str, seconds: float, hop_s: float = _ASSUMED_HOP_S, seed: int = 1) -> float:
    """Return the mean TTFT of the requests that waited for a start, of functions with links of 5 Gbit/s each.

    Without a service on the node, a function fetches its weights itself, once its container runs.
    """
    profile = PROFILES["llama2-7b@a10"]
    if system == "vllm":
        strategy, size = strategy_named("vllm"), 1
    else:
        strategy, size = replace(strategy_named("paraserve"), prefetch=False), 4
    policy = replace(strategy.policy, largest_group=size, contention_aware=True, hop_s=hop_s)
    bounds = replace(policy.bounds, keep_alive_s=_GRACE_S)
    strategy = _sized(with_bounds(replace(strategy, policy=policy), bounds))
    workers = [WorkerRates(_FUNCTION_LINK)] * size
    slo_s = strategy.times(profile, 512).predicted_ttft_s(workers, full_memory=size, hop_s=hop_s) + _WAIT_S
    models = tuple(Model(f"m{number}", profile, ttft_slo_s=slo_s) for number in range(_FUNCTIONS))
    draw = Random(seed).lognormvariate
    weights = [draw(0.0, _SIGMA) for _ in models]
    rates = [0.1 * weight / sum(weights) for weight in weights]
    machines = (Machine("function", 4 * _FUNCTIONS, _FUNCTION_LINK, memory_bytes=24 * GB),)
    fleet = Fleet("functions", machines, models, hop_s=hop_s)
    asked = gamma(rates, 1.0, seconds, [LENGTHS["sharegpt"]], seed)
    outcome = Simulation(fleet, strategy, asked, tick_s=0.5).run()
    return mean([ttft for ttft in outcome.ttft_s if ttft > _WARM_S])


def figure_15(seconds: float) -> Figure:
    alone = mean([functions("vllm", seconds, seed=seed) for seed in _SEEDS])
    grouped = {
        hop_s: mean([functions("paraserve", seconds, hop_s, seed) for seed in _SEEDS]) for hop_s in _STORE_HOPS_S
    }
    found = [Line("vLLM: mean TTFT of cold starts", alone, None, "s")]
    for hop_s, value in grouped.items():
        name = f"four functions, {1000 * hop_s:g} ms from one to the next"
        found.append(Line(f"{name}: mean TTFT of cold starts", value, None, "s"))
        published = 2.6 if hop_s == _ASSUMED_HOP_S else None
        found.append(Line(f"{name}: times as fast", alone / max(value, 1e-9), published, "×"))
    shown = {"vLLM": alone} | {f"four functions, {1000 * hop_s:g} ms": value for hop_s, value in grouped.items()}
    return Figure(
        "paraserve-15",
        "ParaServe Figure 15: cold starts of functions that pass activations through a store",
        bars(shown, "s"),
        found,
        "Llama2 7B on A10s; each function has 5 Gbit/s and ends after five minutes without a request. There is no "
        "service on the node, so a function fetches its weights itself once its container runs. Assumed are groups of "
        "four, and how long an object in the store takes from one to the next, which hardly matters for the first "
        "token. The requests are those of 24 models with rates as unequal as Azure's functions. Means of three runs.",
        [Order("TTFT, order", {"four functions": grouped[_ASSUMED_HOP_S], "vLLM": alone})],
    )
