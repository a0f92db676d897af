"""What a start's timeline becomes, and ParaServe's prediction from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from medusa_runtime.errors import StateError
from medusa_runtime.state.stage_times import StageTimes, WorkerRates, summarize
from medusa_runtime.timeline import Stage

MS = 1_000_000
TIMES = StageTimes(0.2, 0.1, 1.0, 0.5, 0.05, 4 * 10**9, 8e9, 2.0, 3)


def start(slower: int = 0) -> list[Stage]:
    return [
        Stage("exec", "supervisor", 0, 50 * MS, {}),
        Stage("fork", "zygote", 60 * MS, 70 * MS, {}),
        Stage("import", "zygote", 70 * MS, (570 + slower) * MS, {}),
        Stage("fetch", "prefetcher", 80 * MS, 580 * MS, {"bytes": 10**9}),
        Stage("apply", "engine", 600 * MS, 650 * MS, {}),
        Stage("apply", "engine", 650 * MS, 700 * MS, {}),
        Stage("wait", "engine", 620 * MS, 660 * MS, {}),
        Stage("first_forward", "engine", 620 * MS, 720 * MS, {}),
        Stage("first_token", "engine", (730 + slower) * MS, (730 + slower) * MS, {}),
    ]


def test_medians_of_starts() -> None:
    times = summarize([start(), start(900), start(10)], [0.01, 0.09, 0.02])
    assert (times.container_s, times.import_s, times.decode_s) == pytest.approx((0.06, 0.51, 0.02))
    assert times.prefill_s == pytest.approx(0.06)  # without what it waited for weights
    assert (times.weights_bytes, times.load_bytes_per_s, times.starts) == (10**9, pytest.approx(1e10), 3)
    assert times.ttft_s == pytest.approx(0.74)
    assert times.stages["engine/apply"] == pytest.approx(0.1)
    assert "engine/first_token" not in times.stages  # a mark


def test_a_start_without_a_token_is_no_measurement() -> None:
    with pytest.raises(StateError, match="stage first_token"):
        summarize([[stage for stage in start() if stage.name != "first_token"]], [0.01])


def test_one_worker_waits_for_the_slower_of_fetch_and_runtime() -> None:
    assert TIMES.predicted_ttft_s([WorkerRates(1e9)]) == pytest.approx(4.0 + 0.5)  # the fetch hides everything else
    assert TIMES.predicted_ttft_s([WorkerRates(1e11)]) == pytest.approx(0.2 + 0.1 + 1.0 + 0.5)  # the import does
    assert TIMES.predicted_ttft_s([WorkerRates(1e11, 1e9)]) == pytest.approx(0.3 + 4.0 + 0.5)  # loading into the device


def test_a_group_divides_the_fetch_and_the_slowest_member_counts() -> None:
    group = [WorkerRates(1e9), WorkerRates(1e9), WorkerRates(1e9), WorkerRates(0.5e9)]
    assert TIMES.predicted_ttft_s(group, waiting_s=0.3, hop_s=0.01) == pytest.approx(0.3 + 2.0 + 0.5 * 4 + 0.04)
    full = TIMES.predicted_ttft_s(group, full_memory=4, hop_s=0.01)
    assert full == pytest.approx(2.0 + 0.5 + 0.04)  # every one of them is given all layers in turn: t_p once
    assert TIMES.predicted_tpot_s(4, full_memory=2, hop_s=0.01) == pytest.approx(0.05 * 2.5 + 0.04)


def test_times_survive_json_also_without_a_device_to_load_into() -> None:
    endless = replace(TIMES, load_bytes_per_s=float("inf"), stages={"engine/apply": 0.1})
    assert StageTimes.from_bytes(endless.to_bytes()) == endless


@pytest.mark.parametrize("data", [b"", b"{}", json.dumps({"format": 1, "ttft_s": 1}).encode(), b"[1]"])
def test_what_are_no_times_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match="expected stage times"):
        StageTimes.from_bytes(data)
