"""Whole runs: the papers' cold starts, the order of systems, chains, groups and ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from medusa_cluster.policy.decide import Options
from medusa_cluster.simulation.fleet import GBIT, Fleet, Machine, Model
from medusa_cluster.simulation.profiles import GB, PROFILES
from medusa_cluster.simulation.result import Outcome, percentile
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import Strategy, strategy_named
from medusa_cluster.simulation.trace import LENGTHS, Request, gamma
from medusa_runtime.errors import ConfigError
from medusa_runtime.state.stage_times import WorkerRates

from benchmarks.simulation.paraserve import COLD

pytest.importorskip("simpy")


def fleet(model: str, nodes: int = 4, **changes: object) -> Fleet:
    made = Model("m", PROFILES[model])
    return Fleet("test", (Machine("n", nodes, 16 * GBIT, memory_bytes=200 * GB),), (replace(made, **changes),))  # type: ignore[arg-type]


def cold(model: str, strategy: Strategy, ttft_slo_s: float = 1e9) -> float:
    outcome = Simulation(fleet(model, ttft_slo_s=ttft_slo_s), strategy, [Request(0.0, 0, 512, 8)]).run()
    return outcome.ttft_s[0]


@pytest.mark.parametrize("model", COLD)
def test_cold_starts_are_those_of_the_paper_within_15_percent(model: str) -> None:
    s_llm, group = strategy_named("serverlessllm"), strategy_named("paraserve")
    times = group.times(PROFILES[model], 512)
    fastest = times.predicted_ttft_s([WorkerRates(2 * GB, times.load_bytes_per_s)] * 4, full_memory=4, hop_s=0.0005)
    found = (
        cold(model, strategy_named("vllm")),
        cold(model, s_llm),
        cold(model, replace(s_llm, cache="all")),
        cold(model, strategy_named("single")),
        cold(model, group, fastest + 0.01),
    )
    assert found == pytest.approx(COLD[model], rel=0.15)
    assert found[4] == pytest.approx(fastest, abs=0.05)  # the prediction holds, too


def test_a_worker_with_a_part_of_the_memory_may_have_a_part_of_the_computing_power() -> None:
    found = {}
    for follows in (False, True):
        group = strategy_named("paraserve")
        policy = replace(group.policy, follows_memory=follows, hop_s=0.0)
        times = group.times(PROFILES["llama2-7b@a10"], 512)
        slo = times.predicted_ttft_s([WorkerRates(2 * GB)] * 2, full_memory=1 if follows else 2) + 0.01
        one = replace(fleet("llama2-7b@a10", ttft_slo_s=slo), hop_s=0.0)
        found[follows] = Simulation(one, replace(group, policy=policy), [Request(0.0, 0, 512, 8)]).run()
    assert found[False].cold_starts == found[True].cold_starts == 2
    assert found[True].tpot_s[0] == pytest.approx(1.5 * found[False].tpot_s[0])  # Eq. 2: s - w + w/s


def test_a_model_takes_the_times_of_the_device_that_it_starts_on() -> None:
    slow, fast = PROFILES["llama2-7b@v100"], PROFILES["llama2-7b@a10"]
    model = Model("m", fast, others=(("v100", slow),))
    for device, profile in (("v100", slow), ("a10", fast)):
        machines = (Machine("n", 1, 16 * GBIT, 1, device, 200 * GB),)
        ours, expected = (
            Simulation(Fleet("f", machines, (one,)), strategy_named("vllm"), [Request(0.0, 0, 512, 64)]).run()
            for one in (model, Model("m", profile))
        )
        assert (ours.ttft_s[0], ours.tpot_s[0]) == (expected.ttft_s[0], expected.tpot_s[0])


def test_systems_stand_in_the_papers_order_on_a_bursty_trace() -> None:
    models = tuple(
        Model(f"m{number}", PROFILES["llama2-7b@a10"], ttft_slo_s=7.5, tpot_slo_s=0.2) for number in range(24)
    )
    made = Fleet("test", (Machine("n", 8, 16 * GBIT, memory_bytes=100 * GB),), models)
    requests = gamma([0.5 / 24] * 24, 8, 600, [LENGTHS["sharegpt"]])
    met, means = [], []
    for name in ("vllm", "serverlessllm", "paraserve", "paraserve-cache"):
        outcome = Simulation(made, strategy_named(name), requests, tick_s=0.25).run()
        assert outcome.requests == len(requests)
        assert max(outcome.ttft_s) < 1e9  # all were answered
        met.append(outcome.attainment(lambda _: 7.5))
        means.append(outcome.mean_ttft_s())
    assert means == sorted(means, reverse=True)
    assert met[3] >= met[2] > 1.74 * max(met[:2])  # the paper's best


def scaled(name: str) -> Outcome:
    """A burst on a 24B model of which one instance serves, on 8 devices with 100 Gbit/s, disks of 10."""
    machine = Machine("g", 8, 100 * GBIT, store_bytes_per_s=10 * GBIT, memory_bytes=500 * GB)
    made = Fleet("test", (machine,), (Model("m", PROFILES["mistral-24b@a800x2"], min=1, tokens_per_s=6000),))
    requests = [Request(50.0 + number / 20, 0, 2000, 20) for number in range(120)]
    return Simulation(made, strategy_named(name), requests, tick_s=0.05).run()


def test_network_multicast_and_live_scaling_each_help() -> None:
    steps = ("s-llm", "s-llm+network", "s-llm+multicast", "blitzscale")
    means = [scaled(name).mean_ttft_s() for name in steps]
    assert means == sorted(means, reverse=True)
    assert means[3] < 0.25 * means[0]  # BlitzScale §6.1: 47 to 75 % shorter, and more where all comes from disks


def test_all_is_over_at_the_end_and_what_it_cost_is_counted() -> None:
    outcome = scaled("s-llm+multicast")
    assert outcome.requests == 120
    assert outcome.instances[-1][1] == 1  # the minimum
    assert outcome.store_bytes == 0  # the pool has it
    assert 0 < outcome.device_s < 8 * outcome.seconds
    assert outcome.moved_bytes > 48 * GB


def test_a_run_ends_where_a_model_can_never_start() -> None:
    outcome = Simulation(fleet("llama2-7b@a10", device="h100"), strategy_named("medusa"), [Request(0.0, 0, 9, 9)]).run()
    assert outcome.ttft_s[0] == float("inf")
    assert outcome.seconds < 3600


def test_bytes_from_the_store_are_counted_once() -> None:
    for name in ("vllm", "serverlessllm", "single"):  # the first two begin to fetch after the boot
        outcome = Simulation(fleet("llama2-7b@a10"), strategy_named(name), [Request(0.0, 0, 9, 9)]).run()
        assert outcome.store_bytes == pytest.approx(12.5 * GB, rel=1e-6)


def test_the_parts_of_the_time_to_the_first_token_add_up() -> None:
    requests = [Request(0.0, 0, 512, 8)] * 12  # more than an instance takes at once
    outcome = Simulation(fleet("llama2-7b@a10", nodes=1), strategy_named("single"), requests).run()
    assert outcome.ended == 12
    speed = PROFILES["llama2-7b@a10"].speed
    together = 1, 7, 4  # the first is prefilled at once, then those that came meanwhile
    assert outcome.prefill_s == pytest.approx(sum(count * speed.prefill(count * 512) for count in together))
    assert 0 < outcome.queued_s + outcome.prefill_s <= sum(outcome.ttft_s) + 1e-6


def test_provisioned_devices_serve_from_the_start_and_are_paid_for_all_the_time() -> None:
    full, half = scaled("full"), scaled("half")
    assert full.cold_starts == half.cold_starts == 0
    assert full.device_s == pytest.approx(8 * full.seconds)
    assert half.device_s == pytest.approx(4 * half.seconds)
    assert full.mean_ttft_s() < half.mean_ttft_s()


def test_a_group_becomes_one_instance_and_gives_its_devices_back() -> None:
    made = fleet("llama2-13b@v100", ttft_slo_s=9.2)
    outcome = Simulation(made, strategy_named("paraserve"), [Request(0.0, 0, 512, 512)]).run()
    counts = [count for _, count in outcome.instances]
    assert counts[:5] == [1, 2, 3, 4, 3]
    assert counts[-1] == 0
    alone = replace(PROFILES["llama2-13b@v100"].speed, decode_s=0.0).decode(1) + 0.8 * 0.058
    assert outcome.tpot_s[0] < alone * 1.1  # as one instance for most of the answer


def test_a_groups_workers_are_on_one_kind_of_device_and_whole_instances_where_they_fit() -> None:
    def started(*machines: Machine, **changes: object) -> list[str]:
        made = Fleet("test", machines, (replace(Model("m", PROFILES["llama2-13b@v100"]), **changes),))  # type: ignore[arg-type]
        run, names = Simulation(made, strategy_named("paraserve"), [Request(0.0, 0, 512, 64)]), []
        make = run._execution.make
        run._execution.make = lambda start: (names.append(start.node[:3]), make(start))[1]  # type: ignore[method-assign]
        run.run()
        return sorted(names)

    v100 = Machine("v100", 3, 16 * GBIT, device="v100", memory_bytes=200 * GB)
    a10 = replace(v100, name="a10", device="a10")
    assert len(started(v100, replace(a10, count=1), ttft_slo_s=9.2)) == 1  # four would do, but not of both kinds
    assert started(v100, replace(a10, count=4), ttft_slo_s=9.2) == ["a10"] * 4
    small = replace(a10, count=4, device_bytes=24 * GB)
    assert started(small, replace(v100, device_bytes=32 * GB)) == ["v10"]


def test_the_same_run_twice_is_the_same_run() -> None:
    assert scaled("blitzscale").ttft_s == scaled("blitzscale").ttft_s


def test_percentiles_and_unknown_strategies() -> None:
    assert [percentile([3, 1, 2, 4], part) for part in (0.5, 0.99, 0.0)] == [2, 4, 1]
    assert percentile([], 0.5) == 0
    with pytest.raises(ConfigError, match="expected a strategy of medusa"):
        strategy_named("magic")


def test_starts_that_differ_are_drawn_alike_in_each_run() -> None:
    made = replace(fleet("llama2-7b@a10"), start_spread=0.3)
    runs = [
        list(
            Simulation(made, strategy_named("single"), [Request(0.0, 0, 512, 8), Request(900.0, 0, 512, 8)])
            .run()
            .ttft_s
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    assert runs[0][0] == pytest.approx(8.4, rel=0.5)


def test_devices_of_a_host_share_what_one_of_them_has() -> None:
    """A second instance gets the weights from its neighbour, and a host's cards send what its instances hold."""
    host = Machine("h", 2, 800 * GBIT, 4, memory_bytes=500 * GB, fast_bytes_per_s=1600 * GBIT)
    model = Model("m", PROFILES["mistral-24b@a800x2"], min=2, max=6, tokens_per_s=6000, concurrency=64)
    requests = [Request(50.0 + number / 60, 0, 2000, 4) for number in range(300)]
    alone = replace(strategy_named("blitzscale"), policy=Options(live=True, pool=False))
    times = []
    for strategy in (alone, strategy_named("allcache")):
        outcome = Simulation(Fleet("test", (host,), (model,)), strategy, requests, tick_s=0.05).run()
        begin = next(at for at, count in outcome.instances if count > 2)
        times.append(next(at for at, count in outcome.ready if count == 6) - begin)
    assert times[0] == pytest.approx(48 / 50, abs=0.2)  # two of four devices serve: half of 100 GB/s
    assert times[1] == pytest.approx(48 / 32, abs=0.2)


def test_a_request_goes_to_the_instance_with_the_least_work_not_the_fewest_requests() -> None:
    made = fleet("llama2-7b@a10", 2, min=2)
    # A long prompt, and two short ones: all short ones go to the other instance, as a gateway would have it.
    requests = [Request(0.0, 0, 8000, 2), Request(0.01, 0, 100, 2), Request(0.02, 0, 100, 2)]
    outcome = Simulation(made, strategy_named("full"), requests).run()
    assert max(outcome.ttft_s[1:]) < outcome.ttft_s[0] / 2
