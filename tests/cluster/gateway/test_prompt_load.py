"""What a gateway reports: when its load changes, and how many tokens arrive, although it does not tokenize."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, Stream
from medusa_cluster.gateway.call import ROUTES, parse_call
from medusa_cluster.gateway.faults import Fault
from medusa_cluster.gateway.metrics import ModelMetrics, Rate
from medusa_handler.http import openapi
from waiting import until

_LOAD = (
    *("waiting", "running", "longest_wait_s"),
    *("tokens_per_s", "unanswered_tokens", "prefilled_per_s", "decoded_per_s"),
)


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "twelve bytes"}, (0, 12)),
        ("/v1/completions", {"prompt": ["ä", "b"]}, (0, 3)),
        ("/v1/completions", {"prompt": [5, 6, 7]}, (3, 0)),
        ("/v1/completions", {"prompt": [[5, 6], [7]]}, (3, 0)),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "abc"},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "de"}, {"type": "image_url", "image_url": "f"}],
                    },
                ]
            },
            (0, 5),
        ),
        ("/medusa/generate", {"frame": {"prompt": [1, 2], "params": {}}}, (2, 0)),
        ("/v1/embeddings", {"input": "no prompt"}, (0, 0)),
    ],
)
def test_a_prompt_is_measured_in_ids_and_bytes(route: str, body: dict[str, Any], expected: tuple[int, int]) -> None:
    call = parse_call(route, json.dumps({"model": "m", **body}).encode(), {})
    assert (call.prompt_tokens, call.prompt_bytes) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b' { "model": "m", "prompt": "\xc3\xa9", "n": 2}\n',
        b'{"seed": null, "model": "m", "prompt": "\xc3\xa9", "n": 2}',
        b'\xef\xbb\xbf{"model": "m", "prompt": "\xc3\xa9", "n": 2}',
        '{"model": "m", "prompt": "é", "n": 2}'.encode("utf-16"),
        '{"model": "m", "prompt": "é", "n": 2}'.encode("utf-16-le"),
        '{"model": "m", "prompt": "é", "n": 2}'.encode("utf-32-be"),
    ],
)
def test_a_body_without_a_seed_gets_one_and_stays_as_it_is(raw: bytes) -> None:
    body = parse_call("/v1/completions", raw, {}).body
    found = json.loads(body)
    assert isinstance(found.pop("seed"), int)
    assert found == {"model": "m", "prompt": "é", "n": 2}
    assert body.count(b"seed") == 1
    assert len(body) < len(raw) + 40


def test_lone_surrogates_and_a_given_seed_reach_the_instance() -> None:
    lone = b'{"model": "m", "prompt": "\\ud800", "seed": null}'
    assert json.loads(parse_call("/v1/completions", lone, {}).body)["prompt"] == "\ud800"
    given = b'{"model": "m", "prompt": "a", "seed": 5}'
    assert parse_call("/v1/completions", given, {}).body == given


@pytest.mark.parametrize("number", ["NaN", "-Infinity"])
def test_what_is_no_number_is_refused(number: str) -> None:
    with pytest.raises(Fault, match="JSON does not have"):
        parse_call("/v1/completions", f'{{"model": "m", "temperature": {number}}}'.encode(), {})


def test_tokens_of_text_are_estimated_and_learned_from_answers() -> None:
    metrics = ModelMetrics("model")
    assert metrics.prompt_tokens(3, 400) == 103
    for _ in range(50):
        metrics.learn(1000, 500)
    metrics.learn(0, 7)  # of a prompt without text
    assert metrics.prompt_tokens(0, 400) == 200


def test_short_chats_say_little_of_long_prompts() -> None:
    metrics = ModelMetrics("model")
    metrics.learn(2, 32)  # most of them the template's
    assert metrics.prompt_tokens(0, 100_000) < 30_000
    for _ in range(50):
        metrics.learn(2, 32)
    assert metrics.prompt_tokens(0, 2) == 32
    assert metrics.prompt_tokens(0, 100_000) <= 100_030
    metrics.learn(100_000, 25_030)
    assert metrics.prompt_tokens(0, 100_000) < 26_000


def test_a_rate_that_nobody_asks_for_remembers_its_window_alone() -> None:
    rate = Rate(1e-6)
    for _ in range(10_000):
        rate.note(1)
    assert len(rate._noted) < 100


def test_a_load_that_has_not_changed_is_seldom_repeated(
    cluster: StandIn, start_gateway: Callable[..., GatewayProcess]
) -> None:
    cluster.deploy("m")
    start_gateway()
    until(lambda: list(cluster.loads.values()) == [{"m": dict.fromkeys(_LOAD, 0)}])
    before = cluster.reports
    time.sleep(2)
    assert 0 < cluster.reports - before < 10


def test_a_wait_that_grows_is_no_change(cluster: StandIn, start_gateway: Callable[..., GatewayProcess]) -> None:
    cluster.deploy("m")
    gateway = start_gateway()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gateway.post, "/v1/completions", {"model": "m", "prompt": "A" * 40})
        # Then no rate changes any more.
        until(lambda: any(load["m"]["longest_wait_s"] > 3 for load in cluster.loads.values() if "m" in load))
        assert [load["m"]["unanswered_tokens"] for load in cluster.loads.values()] == [10]
        before = cluster.reports
        time.sleep(2)
        assert 0 < cluster.reports - before < 10
        cluster.remove("m")


def test_a_prompt_counts_as_unanswered_until_its_first_token(gateway: GatewayProcess, cluster: StandIn) -> None:
    def load() -> tuple[float, float]:
        (loads,) = cluster.loads.values()
        found = loads.get(NAME, {"running": 0, "unanswered_tokens": 0})
        return found["running"], found["unanswered_tokens"]

    asked: dict[str, Any] = {"prompt": "A" * 40, "max_tokens": 450, "ignore_eos": True, "n": 4}
    stream = Stream(gateway, "/v1/completions", asked)
    stream.take(1)
    until(lambda: load() == (1, 0))
    stream.rest()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(gateway.post, "/v1/completions", {"model": NAME} | asked)
        until(lambda: load()[0] == 1 and load()[1] > 0)
        whole.result(60)
    until(lambda: load() == (0, 0))


def test_all_routes_of_encoders_are_passed_on() -> None:
    assert {*openapi._SCORES, *openapi._RANKINGS, "/classify", "/v1/embeddings"} <= ROUTES
