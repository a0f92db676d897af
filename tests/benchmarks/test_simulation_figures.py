"""The command that draws the papers' figures from simulations."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from medusa_cluster.simulation.result import percentile
from medusa_cluster.simulation.trace import Request
from medusa_runtime.errors import ConfigError

from benchmarks.simulation import blitzscale, equal_slo, groups, medusa, misses, mixed_links, scale
from benchmarks.simulation.__main__ import FIGURES, main
from benchmarks.simulation.figure import LESS, Figure, Line, Order

pytest.importorskip("simpy")


def drawn(name: str, folder: Path) -> str:
    assert main(["--figure", name, "--out", str(folder), "--seconds", "40"]) == 0
    ElementTree.parse(folder / f"{name}.svg")
    return (folder / f"{name}.md").read_text()


_QUICK = ("paraserve-7", "paraserve-9")  # others are computed below, too, but not drawn


@pytest.mark.parametrize("name", _QUICK)
def test_a_figure_is_drawn_with_its_table(name: str, tmp_path: Path) -> None:
    table = drawn(name, tmp_path)
    assert "| what | published | simulated | unit | verdict |" in table


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*FIGURES} - {*_QUICK}))
def test_the_others_are_drawn_too(name: str, tmp_path: Path) -> None:
    assert "| what | published |" in drawn(name, tmp_path)


def test_cold_starts_and_bursts_are_as_published() -> None:
    assert FIGURES["paraserve-8"](0).verdict() == "30 of 30 in band, 6 of 6 orders kept"
    burst = {line.what: line for line in FIGURES["paraserve-14"](0).lines}
    assert burst["TTFT at 128 requests, one over four"].in_band


def test_groups_whose_workers_share_gpus_gain_by_scaling_down() -> None:
    assert FIGURES["paraserve-5"](0).verdict() == "1 of 1 in band, 5 of 5 orders kept"
    assert FIGURES["paraserve-13"](0).verdict() == "1 of 1 in band, 1 of 1 orders kept"


def test_functions_that_pass_activations_through_a_store_start_as_much_faster_as_published() -> None:
    ratio = groups.functions("vllm", 900) / groups.functions("paraserve", 900)
    assert ratio == pytest.approx(2.6, rel=0.2)


def test_misses_are_counted_as_in_the_published_script() -> None:
    def second(at_s: float, instances: int) -> Request:
        return Request(at_s, 0, 13_000 * instances // 4, 1)

    # One more than ever before in five minutes, of three that are started in all.
    assert misses.counted([second(0, 1), second(1, 3), second(2, 1), second(10, 2)]) == pytest.approx(100 * 2 / 3)
    assert misses.counted([second(0, 3), second(290, 1), second(291, 3)]) == 0.0
    assert misses.counted([second(0, 3), second(301, 1), second(302, 3)]) == 100.0
    assert misses.counted([]) == 0.0


def test_starts_of_several_models_miss_hosts_caches_and_not_the_cluster() -> None:
    one, four = (misses.missed(misses.part("s-llm", "azure-code", models, 120)) for models in (1, 4))
    assert one < four
    assert misses.missed(misses.part("blitzscale", "azure-code", 4, 120)) == 0.0


def test_the_parts_of_blitzscale_help_in_the_papers_order() -> None:
    steps = ("s-llm", "s-llm+network", "s-llm+multicast")
    means = [blitzscale.run(step, "azure-conv", 30).mean_ttft_s() for step in steps]
    assert means == sorted(means, reverse=True)


def test_slow_loads_cost_device_time_where_what_waits_is_the_load() -> None:
    loader, ours = (blitzscale.run(system, "azure-conv", 120) for system in ("s-llm", "blitzscale"))
    assert ours.device_s < 0.9 * loader.device_s
    assert ours.mean_ttft_s() < 0.7 * loader.mean_ttft_s()
    assert ours.held_byte_s / ours.seconds < loader.held_byte_s / loader.seconds  # one copy, not one for each host
    waiting, arriving = ours, blitzscale.run("blitzscale", "azure-conv", 120, waiting=False)
    assert arriving.device_s > waiting.device_s
    assert arriving.mean_ttft_s() < waiting.mean_ttft_s()


def test_an_oracle_pays_for_prefills_and_starts_and_nothing_else() -> None:
    case = blitzscale.CASES["azure-conv"]
    alone = [Request(float(second), 0, round(case.capacity / 2), 2) for second in range(8)]
    assert equal_slo.least_prefill_s(alone, 10.0) == pytest.approx(10.0)  # one instance is always there
    burst = [Request(4.0, 0, round(case.capacity), 2) for _ in range(4)]
    start_s, within_s = 0.24, case.slo_s
    # Four seconds of work within the SLO need four instances, the last of them for a part of the time.
    least = equal_slo.least_prefill_s(burst, 10.0)
    assert 10.0 + 3 * start_s + 4.0 - within_s - 0.4 <= least <= 10.0 + 3 * start_s + 4.0


def test_fewer_instances_in_reserve_cost_less_at_nearly_the_same_slo() -> None:
    published, tight = (
        blitzscale.run("blitzscale", "azure-conv", 120, waiting=False, bounds=equal_slo.SETTINGS[name])
        for name in ("published", "0.8 to 0.9")
    )
    least_s = equal_slo.least_prefill_s(blitzscale.requests("azure-conv", 120), 120.0)
    assert least_s + 120 < tight.device_s < 0.9 * published.device_s
    assert tight.attainment(lambda _: 1.25) > 0.98


def test_the_evaluated_part_of_the_code_trace_has_the_papers_two_bursts() -> None:
    at_s = [request.at_s for request in blitzscale.requests("azure-code", 3600)]
    for begin in (3, 203):  # the bursts come at 0:05 and 3:25
        assert sum(begin <= at < begin + 10 for at in at_s) > 4 * len(at_s) * 10 / 300


def test_a_burst_waits_less_than_with_weights_from_disks() -> None:
    (ours,) = (line.ours for line in FIGURES["blitzscale-21"](0).lines if line.what.endswith("mean TTFT below S-LLM's"))
    assert ours >= 75


def test_shorter_loading_phases_have_shorter_tails_in_the_papers_order() -> None:
    tails = [percentile(medusa.run("llama2-7b@a100", system, 2.0, 60).ttft_s, 0.99) for system in medusa.SYSTEMS]
    assert tails == sorted(tails, reverse=True)
    assert 1 - tails[-1] / tails[0] == pytest.approx(0.505, rel=0.2)


@pytest.mark.parametrize(
    ("unit", "published", "near", "far"),
    [
        ("s", 10.0, (8.6, 11.4), (8.4, 11.6)),
        ("×", 2.0, (1.7, 2.3), (1.5, 2.5)),
        ("%", 60.0, (52.1, 67.9), (51.9, 68.1)),
        (LESS, 50.0, (41.0, 59.0), (39.0, 61.0)),  # 40 to 60 % remain
        (LESS, (20.0, 50.0), (5.0, 59.0), (3.0, 61.0)),
    ],
)
def test_a_number_is_in_band_or_out(
    unit: str, published: float, near: tuple[float, float], far: tuple[float, float]
) -> None:
    assert all(Line("a", ours, published, unit).in_band for ours in near)
    assert not any(Line("a", ours, published, unit).in_band for ours in far)
    assert Line("a", near[0], None, unit).in_band is None


def test_a_table_says_what_is_in_band_and_whether_the_papers_order_is_kept() -> None:
    orders = [Order("order", {"a": 1.0, "b": 2.0}), Order("order", {"a": 2.0, "b": 1.0})]
    figure = Figure("n", "t", "", [Line("a", 1.1, 1.0, "s"), Line("b", 7.0, 3.0, "s"), Line("c", 7.0)], "why", orders)
    table = figure.table()
    assert "| a | 1 | 1.1 | s | in band |" in table
    assert "| b | 3 | 7 | s | **out** |" in table
    assert "| c |  | 7 |  |  |" in table
    assert "| order | a < b | b < a | | **not kept** |" in table
    assert figure.verdict() == "1 of 2 in band, 1 of 2 orders kept"
    assert "| what | published | simulated |" in table
    assert "| what | published | measured |" in Figure("n", "t", "", [], "why", by="measured").table()


def test_unknown_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected names of paraserve-5"):
        main(["--figure", "paraserve-99", "--out", str(tmp_path)])


def test_what_a_large_fleet_asks_of_a_controller(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--seconds", "20"]) == 0
    shown = capsys.readouterr().out
    assert "| 10,000 devices, 1,000 models" in shown
    assert "| messages a second, polling | 50,000 |" in shown
    with pytest.raises(ConfigError, match="expected a number above 0"):
        scale.main(["--seconds", "0"])


def test_strategies_are_compared_on_links_of_different_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mixed_links, "_LINKS_GBIT", ((64, 10),))
    monkeypatch.setattr(mixed_links, "_SEEDS", (1,))
    assert mixed_links.main(["--seconds", "60"]) == 0
    shown = capsys.readouterr().out
    assert "| 64 and 10 Gbit/s, slow, 1 | serverlessllm |" in shown
    assert "| all loads, all | medusa |" in shown
