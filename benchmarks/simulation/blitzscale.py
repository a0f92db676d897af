"""BlitzScale's figures: bursts in recorded traces, what they cost, each part's gain, and a live scale-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from medusa_cluster.policy.scaling import Bounds
from medusa_cluster.simulation.fleet import GBIT, Fleet, Machine, Model
from medusa_cluster.simulation.profiles import GB, PROFILES, LinearSpeed
from medusa_cluster.simulation.result import Outcome, mean, percentile
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named, with_bounds
from medusa_cluster.simulation.trace import Request, azure, scale, window

from benchmarks.simulation.figure import LESS, Figure, Line, Order, bars, chart

# The configuration of the published code for these two traces (eval_e2e_sllm_blitz_tp1 and _tp2): instances end when
# the load has been lower for a third of a second, and all spare ones end at the same time.
BOUNDS = Bounds(tokens_lower=0.5, tokens_upper=0.7, keep_alive_s=0.333, window_s=0.333, spare_s=0.0)
_HOST_CACHE_S = 30.0  # as in the published code; the paper's five minutes (§3) would outlast the bursts of Figure 17


@dataclass(frozen=True)
class Case:
    """A trace, and the devices that it runs on.

    ``room`` is the number of instances on a host, and ``least`` the number that always run. ``capacity`` is the prompt
    tokens per second that one instance prefills, and ``counted`` the number that the scaling policy is configured with.
    ``concurrency`` is the number of requests whose keys and values fit beside the weights, with 0.9 of the memory, 131
    and 164 KB per token, and 2,080 and 1,370 tokens per request.
    """

    profile: str
    hosts: int
    room: int
    capacity: float
    counted: float
    least: int
    concurrency: int
    fast_bytes_per_s: float  # between two devices of a host
    slo_s: float
    begin_s: float  # where the evaluated part of the recorded hour begins
    seconds: float


# The code trace runs on cluster B, 2 servers of 8 A100 without NVLink. The conversations run on A800 with NVLink, two
# devices per instance. The published configuration of both (num_gpus_per_node) divides the two servers into hosts of
# four devices, which share a cache and the links that are faster than the network. Its largest numbers of instances are
# 16 and 8. The paper's bursts of code come 5 s and 205 s after the beginning, as at one place in the recorded hour.
CASES = {
    "azure-code": Case(
        "llama3-8b@a800", 4, 4, 12_000.0, 15_000.0, 2, 200, 256 * GBIT, 0.45, begin_s=1975.0, seconds=300.0
    ),
    "azure-conv": Case(
        "mistral-24b@a800x2", 4, 2, 6_000.0, 12_000.0, 1, 400, 1600 * GBIT, 1.25, begin_s=0.0, seconds=480.0
    ),
}
# Prompts per second, of 2,000 tokens each, of a burst that eight 24B instances can serve, and of one that they cannot.
_WHAT_EIGHT_BEAR, _MORE_THAN_EIGHT = 20.0, 60.0
_NICS = 4  # network cards of a host, with 100 Gbit/s each
_BATCH_TOKENS = 4096  # the most prompt tokens in a batch; the published router's default
_TOGETHER = 32  # sequences of an instance that prefills and decodes; the paper does not say how many
SEEDS = (1, 2, 3)
_MORE_SEEDS = range(1, 7)  # for steps that differ by only a percent
# The load as a share of what all instances together could prefill. Half of the cluster prefills, and the load is half
# of that half's capacity.
_SHARE = 0.25


def hosts(case: Case) -> Machine:
    return Machine(
        "host",
        case.hosts,
        _NICS * 100 * GBIT,
        case.room,
        memory_bytes=1000 * GB,
        store_bytes_per_s=10 * GBIT,
        fast_bytes_per_s=case.fast_bytes_per_s,
    )


def fleet(trace: str, *, waiting: bool = True, slo_s: float = math.inf) -> Fleet:
    case = CASES[trace]
    model = Model(
        "m",
        PROFILES[case.profile],
        "",
        slo_s,
        0.2,
        min=case.least,
        tokens_per_s=case.capacity,
        concurrency=case.concurrency,
        disaggregated=True,
        shared_queue=waiting,
        batch_tokens=_BATCH_TOKENS,
    )
    return Fleet(trace, (hosts(case),), (model,))


def requests(trace: str, seconds: float, seed: int = 1) -> list[Request]:
    """Cut the evaluated part of the trace, and scale its mean to half of what half of the cluster can prefill (§6)."""
    case = CASES[trace]
    found = window(azure(trace), case.begin_s, case.begin_s + min(case.seconds, seconds))
    tokens = mean([request.prompt_tokens for request in found])
    return scale(found, _SHARE * case.hosts * case.room * case.capacity / tokens, seed)


def run(
    system: str, trace: str, seconds: float, *, waiting: bool = True, seed: int = 1, bounds: Bounds = BOUNDS
) -> Outcome:
    """Simulate a trace.

    With ``waiting``, prompts wait in one queue, and the tokens in it are the load, as in the published code. Without
    it, each instance has a queue of its own, and the load is the arriving tokens, as in our gateways. Device time
    counts until the trace's end, because the paper does not count instances that wait for more requests afterwards.
    """
    return simulate(system, trace, requests(trace, seconds, seed), seconds, waiting=waiting, bounds=bounds)


def simulate(
    system: str,
    trace: str,
    asked: list[Request],
    seconds: float,
    *,
    waiting: bool = True,
    bounds: Bounds = BOUNDS,
    every: bool = False,
) -> Outcome:
    """Simulate these requests. ``every``: live scaling whether the SLO needs it or not, as without an SLO."""
    case = CASES[trace]
    if waiting:  # the bounds of the published code are parts of what it is configured with
        share = case.counted / case.capacity
        lower, upper = share * bounds.tokens_lower, share * bounds.tokens_upper
        bounds = replace(bounds, tokens_lower=lower, tokens_upper=upper, counts_waiting=True)
    strategy = with_bounds(strategy_named(system), bounds)
    if math.isfinite(strategy.cache_ttl_s):
        strategy = replace(strategy, cache_ttl_s=_HOST_CACHE_S)
    # The published code ends only ready instances, so each load runs to its end. All systems but S-LLM can resume
    # instances that are about to end.
    policy = replace(strategy.policy, ends_starts=False, resume=system != "s-llm")
    strategy = replace(strategy, policy=policy)
    paid_s = min(case.seconds, seconds)
    cluster = fleet(trace, waiting=waiting, slo_s=math.inf if every else case.slo_s)
    return Simulation(cluster, strategy, asked, tick_s=0.1, paid_until_s=paid_s, details=True).run()


def mean_ms(runs: list[Outcome]) -> float:
    return 1000 * mean([outcome.mean_ttft_s() for outcome in runs])


def repeated(system: str, trace: str, seconds: float, seeds: Iterable[int] = SEEDS) -> list[Outcome]:
    """Run a trace once for each seed. The scaling draws which requests are repeated, and with what lengths."""
    return [run(system, trace, seconds, seed=seed) for seed in seeds]


def figure_17(seconds: float) -> Figure:
    found, orders, shown = [], [], {}
    published: dict[str, float | tuple[float, float]] = {"azure-code": (47.0, 75.5), "azure-conv": 48.1}
    between = {"azure-code": (88.3, 94.1), "azure-conv": (0.7, 1.8)}  # percent that its tokens are nearer to each other
    for trace, less in published.items():
        means, gaps = {}, {}
        for system in ("s-llm", "allcache", "blitzscale"):
            runs = repeated(system, trace, seconds)
            means[system], gaps[system] = mean_ms(runs), mean([one.mean_tpot_s() for one in runs])
            shown[f"{trace}, {system}"] = means[system]
            found.append(Line(f"{trace}, {system}: mean TTFT", means[system], None, "ms"))
        found.append(
            Line(f"{trace}: shorter than S-LLM's", 100 * (1 - means["blitzscale"] / means["s-llm"]), less, LESS)
        )
        found.append(
            Line(f"{trace}: shorter than AllCache's", 100 * (1 - means["blitzscale"] / means["allcache"]), None, LESS)
        )
        shorter = 100 * (1 - gaps["blitzscale"] / gaps["s-llm"])
        found.append(Line(f"{trace}: TBT shorter than S-LLM's", shorter, between[trace], LESS))
        orders.append(Order(f"{trace}, order", {system: means[system] for system in ("blitzscale", "s-llm")}))
    found += limits("azure-code", seconds)
    return Figure(
        "blitzscale-17",
        "BlitzScale Figure 17: time to the first token under recorded traces",
        bars(shown, "ms"),
        found,
        "The paper gives 47 to 75.5 % over its three workloads, without saying which part code has; 75.5 % is of "
        "BurstGPT, which is not among our traces. Means of three runs. The published "
        "configuration has caches for groups of four devices, so that only what serves from the beginning finds a "
        "copy in host memory. Code's two bursts ask for more than all instances can prefill, as the last lines show, "
        "if the trace is scaled to half of the cluster's capacity as the text says: with half the load more is gained. "
        "Between tokens (TBT) nothing is gained: here decode instances have room, and a first token waits for room.",
        orders,
    )


def limits(trace: str, seconds: float) -> list[Line]:
    """Return lines with the load of the ten busiest seconds, and a comparison of the systems at half the load."""
    case, asked = CASES[trace], requests(trace, seconds)
    tokens: dict[int, int] = {}
    for request in asked:
        tokens[int(request.at_s)] = tokens.get(int(request.at_s), 0) + request.prompt_tokens
    peak = max(sum(tokens.get(at + more, 0) for more in range(10)) / 10 for at in tokens)
    most = (case.hosts * case.room - case.least) * case.capacity
    means = {}
    for system in ("s-llm", "blitzscale"):
        half = [request for number, request in enumerate(asked) if number % 2]
        means[system] = simulate(system, trace, half, seconds).mean_ttft_s()
    return [
        Line(f"{trace}: prompt tokens a second, in the fullest ten seconds", peak, None, ""),
        Line(f"{trace}: prompt tokens a second that all instances but the least can prefill", most, None, ""),
        Line(
            f"{trace}, every second request: shorter than S-LLM's",
            100 * (1 - means["blitzscale"] / means["s-llm"]),
            None,
            LESS,
        ),
    ]


# What counts as the load: as our gateways report it, and as the published code counts it. The value is ``waiting``.
_LOADS = {"load: what arrives": False, "load: what waits": True}


def figure_18(seconds: float) -> Figure:
    found, orders, shown = [], [], {}
    trace = "azure-conv"
    base = run("full", trace, seconds)

    def late(outcome: Outcome, mean_s: float) -> float:
        return 100 * (1 - outcome.attainment(lambda _: 5 * mean_s))

    def add(name: str, outcome: Outcome, published: float | None = None) -> None:
        own = outcome.mean_ttft_s()
        found.append(Line(f"{name}: first tokens later than 5 × their mean", late(outcome, own), published, "%"))
        of_full = late(outcome, base.mean_ttft_s())
        found.append(Line(f"{name}: first tokens later than 5 × the mean of full", of_full, None, "%"))
        found.append(Line(f"{name}: device time", outcome.device_s, None, "s"))
        shown[name] = outcome.device_s

    add("full", base, 0.0)
    add("half", run("half", trace, seconds))
    for load, waiting in _LOADS.items():
        loader, ours = (run(system, trace, seconds, waiting=waiting) for system in ("s-llm", "blitzscale"))
        add(f"s-llm, {load}", loader, 18.7)
        add(f"blitzscale, {load}", ours, 0.0)
        found.append(Line(f"{load}: below S-LLM's", 100 * (1 - ours.device_s / loader.device_s), 19.46, LESS))
        found.append(Line(f"{load}: below full provisioning", 100 * (1 - ours.device_s / base.device_s), 49.0, LESS))
        found.append(
            Line(f"{load}: TTFT below S-LLM's", 100 * (1 - ours.mean_ttft_s() / loader.mean_ttft_s()), 48.1, LESS)
        )
        times = {"blitzscale": ours.device_s, "s-llm": loader.device_s, "full": base.device_s}
        orders.append(Order(f"{load}: device time, order", times))
    for system in ("s-llm", "s-llm+network", "s-llm+multicast", "blitzscale", "allcache"):
        found += parts(system, repeated(system, trace, seconds))
    profile = PROFILES[CASES[trace].profile]
    tokens = sum(request.prompt_tokens for request in requests(trace, seconds))
    assert isinstance(profile.speed, LinearSpeed)
    found.append(Line("prefill alone, always busy", tokens * profile.speed.prefill_s_per_token, None, "s"))
    return Figure(
        "blitzscale-18",
        "BlitzScale Figure 18: SLO violations and device time against provisioned systems",
        bars(shown, "device seconds"),
        found,
        "The paper calls a request late that takes five times the average, without saying whose. The published code "
        "counts the prompt tokens that wait as the load, so S-LLM's slow loads let a queue grow that starts more "
        "instances: that is its device time. Our gateways report what arrives: instances are then there for each "
        "peak, first tokens come as early as with full provisioning, and slow loads cost no device time. With what "
        "waits, an instance is added when the queue is half a second long as its configured speed counts it, which is "
        "why most first tokens are later than five times the mean of full provisioning. As in the published code, "
        "loads run to their end, and all systems but S-LLM let instances go on that are about to end. The lines of the "
        "parts of each system are means of three runs.",
        orders,
    )


def parts(system: str, runs: list[Outcome]) -> list[Line]:
    """Divide the mean device time of some runs into loading, each role's serving, and ending; also return their sum."""
    sums = dict.fromkeys(("loading", "prefill", "decode", "ending"), 0.0)
    for outcome in runs:
        for key, spent_s in outcome.roles_s.items():
            role, state = key.split()
            sums[{"starting": "loading", "draining": "ending"}.get(state, role)] += spent_s / len(runs)
    sums["all"] = sum(sums.values())
    found = [Line(f"load: what waits: {system}, {part}", spent_s, None, "s") for part, spent_s in sums.items()]
    late = 100 * mean([1 - outcome.attainment(lambda _: CASES["azure-conv"].slo_s) for outcome in runs])
    return [*found, Line(f"load: what waits: {system}, later than 1.25 s", late, None, "%")]


def _by_trace(
    systems: Sequence[str], seconds: float, measured: Callable[[str, Outcome], list[tuple[str, float, str]]]
) -> tuple[list[Line], list[Order], dict[str, float]]:
    """Simulate each trace with each system. ``measured`` returns lines: text, value, unit. The last one is shown."""
    found, orders, shown = [], [], {}
    for trace in CASES:
        values = {}
        for system in systems:
            lines = measured(trace, run(system, trace, seconds))
            found += [Line(f"{trace}, {system}: {text}", value, None, unit) for text, value, unit in lines]
            values[system] = shown[f"{trace}, {system}"] = lines[-1][1]
        orders.append(Order(f"{trace}, order", values))
    return found, orders, shown


def figure_19(seconds: float) -> Figure:
    def copies(trace: str, outcome: Outcome) -> list[tuple[str, float, str]]:
        size = fleet(trace).models[0].profile.size_bytes
        mean_copies = outcome.held_byte_s / outcome.seconds / size if outcome.seconds else 0.0
        return [("copies in host memory, mean", mean_copies, "")]

    found, orders, shown = _by_trace(("blitzscale", "s-llm"), seconds, copies)
    return Figure(
        "blitzscale-19",
        "BlitzScale Figure 19: host memory that holds weights",
        bars(shown, "copies"),
        found,
        "The paper normalizes: less than one copy for BlitzScale, one for each host that serves for S-LLM. "
        "BlitzScale's weights go from device to device; our pool keeps its one copy in host memory also while "
        "instances serve. S-LLM's go through host memory on each host, and stay for 30 s after the last instance.",
        orders,
    )


def figure_20(seconds: float) -> Figure:
    found, orders = [], []
    series: dict[str, list[tuple[float, float]]] = {}
    steps = ("s-llm", "s-llm+network", "s-llm+multicast", "blitzscale")
    for trace in CASES:
        means = {}
        for number, system in enumerate(steps):
            runs = repeated(system, trace, seconds, _MORE_SEEDS)
            value = means[system] = mean_ms(runs)
            series.setdefault(trace, []).append((float(number), value))
            found.append(Line(f"{trace}, {system}: mean TTFT", value, None, "ms"))
        orders.append(Order(f"{trace}, order", dict(reversed(means.items()))))
        starts, fetched, relieved = (
            mean([float(count) for count in counts])
            for counts in zip(*((run.cold_starts, run.fetches, run.relieved) for run in runs), strict=True)
        )
        found.append(Line(f"{trace}, blitzscale: starts", starts, None, ""))
        found.append(Line(f"{trace}, blitzscale: of them fetched from another host", fetched, None, ""))
        found.append(Line(f"{trace}, blitzscale: of them relieved an instance", relieved, None, ""))
    return Figure(
        "blitzscale-20",
        "BlitzScale Figure 20: what network, multicast and live scaling bring",
        chart(series, "0 S-LLM, 1 +network, 2 +multicast, 3 +ZigZag", "mean TTFT, ms"),
        found,
        "The paper plots each step relative to the first, without numbers; the order of the steps is to be compared. "
        "Means of six runs. Network brings nearly all: as the last lines of each trace show, most instances start "
        "on a host that has the weights in another device, and copy them from it. Our policy counts a host as one "
        "receiver, so only a host's first instance is in a chain and relieves another one; in the paper each device "
        "is.",
        orders,
    )


def burst(system: str, rate: float, *, count: int = 1, host_gbit: float = 128.0) -> Outcome:
    """Send bursts of eight seconds, with ``rate`` requests per second, to two 24B instances that may become eight.

    With several bursts, which come every 40 s, loads run to their end, as in the other figures. ``host_gbit``: the
    speed of the link between host memory and each of an instance's two devices, in Gbit/s.
    """
    machine = hosts(CASES["azure-conv"])
    profile = PROFILES["mistral-24b@a800x2"]
    profile = replace(profile, stages=replace(profile.stages, load_bytes_per_s=2 * host_gbit * GBIT))
    model = Model("m", profile, min=2, max=8, tokens_per_s=6000, concurrency=64)
    asked = [
        Request(40.0 * turn + number / rate, 0, 2000, 4)
        for turn in range(1, count + 1)
        for number in range(round(8 * rate))
    ]
    strategy = with_bounds(strategy_named(system), Bounds(keep_alive_s=100.0))
    # In this figure, the serving instances are the sources.
    policy = replace(strategy.policy, pool=False, ends_starts=count == 1)
    strategy = replace(strategy, policy=policy)
    return Simulation(Fleet("scale", (machine,), (model,)), strategy, asked, tick_s=0.05, details=True).run()


def _all_ready_s(outcome: Outcome) -> float:
    """Return the seconds from the first start until eight instances are ready."""
    begin = next(at for at, count in outcome.instances if count > 2)
    return next(at for at, count in outcome.ready if count >= 8) - begin


def figure_21(seconds: float) -> Figure:
    """Draw what is served while six 24B instances start beside two, and measure when all are ready."""
    del seconds
    series: dict[str, list[tuple[float, float]]] = {}
    done: dict[str, float] = {}
    for system in ("allcache", "s-llm+multicast", "blitzscale"):
        outcome = burst(system, _MORE_THAN_EIGHT)
        done[system] = _all_ready_s(outcome)
        series[system] = [
            (
                step / 10,
                sum(tokens for at, tokens in outcome.served if 0 <= at - 40 - step / 10 + 0.5 < 0.5) / 0.5 / 1000,
            )
            for step in range(60)
        ]
    published = {"blitzscale": 1.2, "allcache": 2.0}
    found = [
        Line(f"{system}: six instances are there", value, published.get(system), "s") for system, value in done.items()
    ]
    means = {system: burst(system, _WHAT_EIGHT_BEAR).mean_ttft_s() for system in ("s-llm", "allcache", "blitzscale")}
    found += [Line(f"{system}, 20 requests a second: mean TTFT", value, None, "s") for system, value in means.items()]
    shorter = 100 * (1 - means["blitzscale"] / means["s-llm"])
    found.append(Line("blitzscale, 20 requests a second: mean TTFT below S-LLM's", shorter, 75.5, LESS))
    for count in (5, 8):
        ours, loader = (burst(system, _WHAT_EIGHT_BEAR, count=count) for system in ("blitzscale", "s-llm"))
        shorter = 100 * (1 - ours.mean_ttft_s() / loader.mean_ttft_s())
        found.append(Line(f"the same of {count} bursts", shorter, None, LESS))
    slower = burst("allcache", _MORE_THAN_EIGHT, host_gbit=107.0)
    found.append(Line("allcache, 107 Gbit/s a device: six instances are there", _all_ready_s(slower), None, "s"))
    return Figure(
        "blitzscale-21",
        "BlitzScale Figure 21: scaling six 24B instances at once",
        chart(series, "seconds since the burst", "thousand prompt tokens a second"),
        found,
        "Two instances serve on one host, and their four network cards bring the weights to the others. The paper "
        "does not say on how many hosts its instances are. The published mean TTFT is that of BurstGPT (Figure 17), "
        "the paper's largest gain; here S-LLM's other hosts have no copy, and read it from their disks. In several "
        "bursts 40 s apart, loads run to their end and later bursts find caches. From host memory, 1.7 s are 128 "
        "Gbit/s, as in the paper's Table 1; the last line shows which speed 2.0 s would be.",
        [Order("six instances are there, order", {system: done[system] for system in ("blitzscale", "allcache")})],
    )


def figure_22(seconds: float) -> Figure:
    def moved(trace: str, outcome: Outcome) -> list[tuple[str, float, str]]:
        machine, paid_s = hosts(CASES[trace]), min(CASES[trace].seconds, seconds)
        share = 100 * outcome.moved_bytes / (machine.count * machine.link_bytes_per_s * paid_s)
        return [
            ("weights that travelled", outcome.moved_bytes / GB, "GB"),
            ("of what all network cards can receive", share, "%"),
        ]

    found, orders, shown = _by_trace(("s-llm", "blitzscale"), seconds, moved)
    return Figure(
        "blitzscale-22",
        "BlitzScale Figure 22: weights on the network",
        bars(shown, "%"),
        found,
        "The paper plots the use of the network over time, without numbers, and calls what scaling adds negligible. "
        "Keys and values, which both systems send alike, are not simulated. S-LLM's weights come from disks.",
        orders,
    )


def together(system: str, seconds: float, seed: int = 1) -> Outcome:
    """Simulate the code trace with a 7B model whose instances prefill and decode, on 16 devices."""
    case = CASES["azure-code"]
    model = Model(
        "m",
        PROFILES["llama2-7b@a100"],
        "",
        case.slo_s,
        0.2,
        min=case.least,
        tokens_per_s=case.capacity,
        concurrency=_TOGETHER,
        batch_tokens=_BATCH_TOKENS,
    )
    strategy = with_bounds(strategy_named(system), BOUNDS)
    strategy = replace(strategy, policy=replace(strategy.policy, ends_starts=False))
    asked = requests("azure-code", seconds, seed)
    paid_s = min(case.seconds, seconds)
    return Simulation(
        Fleet("together", (hosts(case),), (model,)), strategy, asked, tick_s=0.1, paid_until_s=paid_s
    ).run()


def figure_24(seconds: float) -> Figure:
    tails, found = {}, []
    for system in ("blitzscale", "full", "half"):
        runs = [together(system, seconds, seed) for seed in SEEDS]
        tails[system] = mean([percentile(outcome.ttft_s, 0.99) for outcome in runs])
        found.append(Line(f"{system}: p99 TTFT", tails[system], None, "s"))
        found.append(Line(f"{system}: mean TTFT", mean_ms(runs), None, "ms"))
        found.append(Line(f"{system}: device time", mean([outcome.device_s for outcome in runs]), None, "s"))
    found.append(Line("blitzscale's p99 over half's", tails["blitzscale"] / tails["half"], 0.24, "×"))
    found.append(Line("blitzscale's p99 over full's", tails["blitzscale"] / tails["full"], None, ""))
    return Figure(
        "blitzscale-24",
        "BlitzScale Figure 24: prefill and decode on the same instances",
        bars(tails, "s"),
        found,
        "The paper has BurstGPT, which is not among our traces; this is the code trace with the same model. Its vLLM "
        "has all devices (full), or as many as are needed on average: here half of them cost as much as what scales. "
        'It says that the p99 is comparable with full provisioning, and "0.24× shorter" than with an average one. That '
        "is read as 0.24 times as long. With 64 sequences an instance it is 0.27 times as long. Means of three runs.",
        [Order("p99 TTFT, order", {system: tails[system] for system in ("blitzscale", "half")})],
    )
