"""Traces: recorded, made, scaled."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest
from medusa_cluster.simulation.trace import (
    LENGTHS,
    Request,
    azure,
    gamma,
    poisson,
    popularity,
    read_csv,
    repeat,
    scale,
    window,
)
from medusa_runtime.errors import ConfigError


def gaps(requests: list[Request]) -> list[float]:
    return [after.at_s - before.at_s for before, after in pairwise(requests)]


def test_the_azure_traces_are_complete() -> None:
    code, conv = azure("azure-code"), azure("azure-conv")
    assert (len(code), len(conv)) == (8819, 19366)
    assert code[-1].at_s == pytest.approx(3436, abs=1)
    assert mean(request.prompt_tokens for request in code) == pytest.approx(2048, abs=1)
    found = gaps(code)
    assert stdev(found) / mean(found) == pytest.approx(13.2, abs=0.1)


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_gamma_arrivals_have_their_rate_and_variation(cv: float) -> None:
    requests = gamma([5.0], cv, 20_000, [LENGTHS["sharegpt"]])
    found = gaps(requests)
    assert len(requests) / 20_000 == pytest.approx(5, rel=0.1)
    assert stdev(found) / mean(found) == pytest.approx(cv, rel=0.1)
    assert requests == gamma([5.0], cv, 20_000, [LENGTHS["sharegpt"]])
    assert mean(request.prompt_tokens for request in requests) == pytest.approx(161, rel=0.05)


def test_poisson_and_popularity() -> None:
    rates = popularity(3, 11.0, 1.0)
    assert rates == pytest.approx([6, 3, 2])
    requests = poisson(rates, 1000, [LENGTHS["sharegpt"]])
    assert [sum(request.model == number for request in requests) for number in range(3)] == pytest.approx(
        [6000, 3000, 2000], rel=0.1
    )


def test_a_scaled_trace_keeps_its_shape() -> None:
    trace = azure("azure-code")
    for factor in (0.5, 3.0):
        found = scale(trace, 2.57 * factor)
        assert len(found) == pytest.approx(len(trace) * factor, rel=0.05)
        for begin in range(0, 3400, 850):
            before = sum(begin <= request.at_s < begin + 850 for request in trace)
            after = sum(begin <= request.at_s < begin + 850 for request in found)
            assert after == pytest.approx(before * factor, rel=0.1)


def test_windows_and_repetitions() -> None:
    trace = [Request(float(number), 0, 1, 1) for number in range(10)]
    assert [request.at_s for request in window(trace, 2, 4)] == [0, 1]
    assert [request.at_s for request in repeat(trace, 13)] == [*range(10), 10, 11, 12]


def test_a_users_own_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "timestamp,input_tokens,output_tokens,model\n2024-01-01T00:00:02,5,6,b\n2024-01-01T00:00:00,3,4,a\n"
    )
    assert read_csv(path, ["a", "b"]) == [Request(0.0, 0, 3, 4), Request(2.0, 1, 5, 6)]
    path.write_text("timestamp,input_tokens,output_tokens\n10.5,3,4\n10.75,5,6\n")
    assert read_csv(path, ["a"]) == [Request(0.0, 0, 3, 4), Request(0.25, 0, 5, 6)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,tokens\n", "expected the columns"),
        ("timestamp,input_tokens,output_tokens,model\n1,2,3,c\n", ':2: the fleet has no model "c"'),
        ("timestamp,input_tokens,output_tokens\n1,2,3\nnoon,2,3\n", ":3: expected a time and two numbers"),
        ("timestamp,input_tokens,output_tokens\n", "expected requests, found none"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_csv(path, ["a", "b"])
    with pytest.raises(ConfigError, match="could not be read"):
        read_csv(tmp_path / "none.csv", ["a"])
    with pytest.raises(ConfigError, match="expected a trace of"):
        azure("azure-chat")


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ("2024-01-01 01:00:00.1234567+02:00", "2024-01-01 00:00:00.1234567+01:00", 0.0),  # as recorders write them
        ("2024-03-31T00:30:00", "2024-03-31T03:30:00", 3 * 3600.0),  # over a change of the clocks here
        ("2024-01-01T00:00:00Z", "2024-01-01T00:00:01", 1.0),
    ],
)
def test_a_time_is_the_same_wherever_a_trace_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, seconds: float
) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    path = tmp_path / "trace.csv"
    path.write_text(f"\ufefftimestamp,input_tokens,output_tokens\n{first},1,1\n{second},1,1\n", encoding="utf-8")
    try:
        assert [request.at_s for request in read_csv(path, ["a"])] == [0.0, seconds]
    finally:
        monkeypatch.undo()
        time.tzset()
