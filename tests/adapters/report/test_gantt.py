"""The chart in the terminal, and the time that no stage accounts for."""

from __future__ import annotations

import pytest
from medusa_adapters.report.gantt import gaps, largest_gap_ms, render_text, tracks
from medusa_runtime.timeline import Stage, window

MS = 1_000_000


def stage(name: str, process: str, start: float, end: float | None = None) -> Stage:
    """Times in milliseconds after an arbitrary origin; without an end it is a mark."""
    origin = 5_000 * MS
    return Stage(name, process, origin + int(start * MS), origin + int((start if end is None else end) * MS), {})


START = [
    stage("exec", "supervisor", 0, 30),
    stage("fetch", "prefetcher", 40, 400),
    stage("import", "zygote", 42, 780),
    stage("apply", "engine", 790, 800),
    stage("apply", "engine", 810, 820),
    stage("prefill", "engine", 800, 868),
    stage("ready", "engine", 821),
    stage("first_token", "engine", 870),
]


def relative(spans: list[tuple[int, int]]) -> list[tuple[float, float]]:
    return [((start - 5_000 * MS) / MS, (end - 5_000 * MS) / MS) for start, end in spans]


def test_gaps_are_what_no_process_covers() -> None:
    assert relative(gaps(START)) == [(30, 40), (780, 790), (868, 870)]
    assert largest_gap_ms(START) == 10


def test_a_mark_covers_nothing_and_later_work_does_not_count() -> None:
    stages = [*START, stage("look", "engine", 785), stage("decode", "engine", 900, 950)]
    assert gaps(stages) == gaps(START)


def test_a_stage_over_the_first_token_covers_up_to_it() -> None:
    assert relative(gaps([stage("a", "p", 0, 100), stage("first_token", "p", 60)])) == []


def test_no_stages_no_gaps() -> None:
    assert gaps([]) == []
    assert largest_gap_ms([]) == 0
    assert render_text([]) == "no stages were recorded"


def test_a_start_without_a_token_is_accounted_for_until_it_is_ready() -> None:
    stages = [stage("exec", "s", 0, 10), stage("load", "e", 15, 20), stage("ready", "e", 22)]
    assert relative(gaps(stages)) == [(10, 15), (20, 22)]


def test_a_request_that_came_later_is_no_part_of_the_start() -> None:
    idle = [stage("exec", "s", 0, 10), stage("ready", "e", 10), stage("prefill", "e", 9000, 9010)]
    assert relative([window([*idle, stage("first_token", "e", 9010)])]) == [(0, 10)]
    assert "first token" not in render_text([*idle, stage("first_token", "e", 9010)])
    late = [*idle, stage("app", "function", 5, 400)]  # the function's own start ends after the model's
    assert relative([window([*late, stage("first_token", "e", 9010)])]) == [(0, 10)]
    held = [*late, stage("prefill", "e", 410, 440)]
    assert relative([window([*held, stage("first_token", "e", 440)])]) == [(0, 440)]
    busy = [stage("exec", "s", 0, 10), stage("ready", "e", 10), stage("prefill", "e", 11, 9010)]
    assert relative([window([*busy, stage("first_token", "e", 9010)])]) == [(0, 9010)]


def test_repeated_stages_share_a_track() -> None:
    rows = {(row.process, row.name): row for row in tracks(START)}
    apply = rows["engine", "apply"]
    assert apply.stages == 2
    assert apply.busy_ns == 20 * MS
    assert relative(list(apply.spans)) == [(790, 800), (810, 820)]
    assert [row.process for row in tracks(START)][:3] == ["supervisor", "prefetcher", "zygote"]


@pytest.mark.parametrize("width", [60, 80, 137])
def test_the_chart_is_aligned_and_fits(width: int) -> None:
    lines = render_text(START, width).splitlines()
    chart, sums = lines[:-1], lines[-1]
    assert all(len(line) <= width for line in chart)
    column = lines[0].index("ms", 10) + 4  # bars begin two columns behind the "ms" of the head
    bars = {line.split()[0]: line[column:] for line in chart[1:] if line.startswith("  ")}
    assert bars["exec"][0] == "█"
    assert bars["import"].startswith(" ")
    share = bars["import"].count("█") / len(lines[0][column:])
    assert share == pytest.approx(738 / 870, abs=0.03)
    assert bars["first_token"].strip() == "◆"
    assert bars["apply"].lstrip() != ""
    assert "first token after 870 ms" in sums
    assert "22 ms in no stage (longest 10 ms, from 30 ms)" in sums


def test_a_chart_with_nothing_missing_says_so() -> None:
    assert "every millisecond is in a stage" in render_text([stage("a", "p", 0, 9), stage("first_token", "p", 9)])


def test_a_start_of_no_length_can_be_drawn() -> None:
    assert "exec" in render_text([stage("exec", "supervisor", 0)])


def test_an_instance_is_ready_when_its_handler_is_loaded_too() -> None:
    stages = [*START[:-1], stage("handler", "function", 100, 5000)]
    assert relative([window(stages)]) == [(0, 5000)]
    assert "ready after 5000 ms" in render_text(stages)
    assert relative([window([*stages, stage("handler", "function", 6000, 7000)])]) == [(0, 5000)]  # a new worker's
