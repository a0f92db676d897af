"""No request is lost whose gateway lives: instances are killed and stopped for real while they answer."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, Instance, Stream
from waiting import until

Start = Callable[..., Any]

PROMPT = "This function returns"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}
SEEDED = {"temperature": 1.0, "seed": 11, "ignore_eos": True, "max_tokens": 400}


@pytest.fixture
def pair(cluster: StandIn, start_gateway: Start, start_instance: Start, served: tuple[Instance, ...]) -> Pair:
    return Pair(cluster, start_gateway(), start_instance(), served[0])


class Pair:
    """A gateway with an instance that the test may harm, which gets the first request, and one that stays."""

    def __init__(self, cluster: StandIn, gateway: GatewayProcess, victim: Instance, other: Instance) -> None:
        self.cluster, self.gateway, self.victim, self.other = cluster, gateway, victim, other
        cluster.deploy(NAME)
        cluster.add(NAME, "a-victim", victim.url)
        cluster.add(NAME, "b-other", other.url)
        until(lambda: gateway.metric("medusa_gateway_ready_instances") == 2, gateway.output)

    def alone(self, path: str, body: dict[str, Any]) -> dict[int, str]:
        """The texts that the instance that stays answers, undisturbed."""
        choices = self.answer_alone(path, body)["choices"]
        return {c["index"]: c.get("text") or c.get("message", {}).get("content") for c in choices}

    def answer_alone(self, path: str, body: dict[str, Any]) -> Any:
        return self.other.exchange("POST", path, json.dumps(body), {"Content-Type": "application/json"}).json


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, **GREEDY}),
        pytest.param(
            "/v1/completions",
            {"prompt": [PROMPT, "The value"], "n": 2, "logprobs": 1, **SEEDED},
            marks=pytest.mark.slow,
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "n": 2, **SEEDED}),
    ],
)
def test_a_stream_goes_on_after_its_instance_was_killed(pair: Pair, path: str, body: dict[str, Any]) -> None:
    stream = Stream(pair.gateway, path, body)
    stream.take(5)  # and no more: the victim must not have sent all of it before the signal, also on a busy machine
    pair.victim.signal(signal.SIGKILL)
    stream.rest()
    assert stream.error is None
    assert stream.texts() == pair.alone(path, body)
    assert len({chunk["id"] for chunk in stream.chunks}) == 1
    ends = [
        choice["finish_reason"] for chunk in stream.chunks for choice in chunk["choices"] if choice["finish_reason"]
    ]
    assert ends == ["length"] * len(stream.texts())
    assert pair.gateway.metric("medusa_gateway_retries_total", reason="lost") == 1


@pytest.mark.slow
def test_a_stream_without_a_seed_gets_one_and_goes_on(pair: Pair) -> None:
    stream = Stream(pair.gateway, "/v1/completions", {"prompt": PROMPT, "ignore_eos": True, "max_tokens": 120})
    stream.take(20)
    pair.victim.signal(signal.SIGKILL)
    stream.rest()
    assert stream.error is None
    assert sum(bool(chunk["choices"][0]["text"]) for chunk in stream.chunks) >= 100
    assert pair.gateway.metric("medusa_gateway_retries_total", reason="diverged") == 0


@pytest.mark.slow
def test_log_probabilities_come_once_for_each_token(pair: Pair) -> None:
    body = {"prompt": PROMPT, "logprobs": 2, **GREEDY}
    stream = Stream(pair.gateway, "/v1/completions", body)
    stream.take(10)
    pair.victim.signal(signal.SIGKILL)
    stream.rest()
    tokens = [token for chunk in stream.chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    offsets = [offset for chunk in stream.chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    alone = pair.answer_alone("/v1/completions", body)["choices"][0]["logprobs"]
    assert (tokens, offsets) == (alone["tokens"], alone["text_offset"])


def test_a_whole_answer_is_run_again(pair: Pair) -> None:
    body = {"model": NAME, "prompt": PROMPT, **SEEDED}
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(pair.gateway.post("/v1/completions", body)))
    asking.start()
    until(lambda: pair.cluster.calls)
    pair.victim.signal(signal.SIGKILL)
    asking.join(60)
    status, answer = answers[0]
    assert status == 200, answer
    assert answer["choices"][0]["text"] == pair.alone("/v1/completions", body)[0]


def test_an_engine_that_is_killed_ends_no_request(pair: Pair) -> None:
    """The instance says so in an event of the stream; it starts its engine again, and the other goes on meanwhile."""
    body = {"prompt": PROMPT, **SEEDED}
    stream = Stream(pair.gateway, "/v1/completions", body)
    stream.take(5)
    pair.victim.signal_role("engine", signal.SIGKILL)
    stream.rest()
    assert stream.error is None
    assert stream.texts() == pair.alone("/v1/completions", body)


@pytest.mark.slow
def test_a_stopped_instance_holds_nobody_up_for_long(pair: Pair) -> None:
    body = {"prompt": PROMPT, **SEEDED}
    stream = Stream(pair.gateway, "/v1/completions", body)
    stream.take(5)
    pair.victim.signal(signal.SIGSTOP)
    stream.rest()
    assert stream.error is None
    assert stream.texts() == pair.alone("/v1/completions", body)
    pair.victim.signal(signal.SIGCONT)
    # It gets requests again once it answers its probes.
    pair.cluster.drop(NAME, "b-other")
    status, _ = pair.gateway.post("/v1/completions", {"model": NAME, "prompt": PROMPT, "max_tokens": 2})
    assert status == 200


def test_the_only_instance_is_waited_for(pair: Pair, start_instance: Start) -> None:
    """Its successor gets the request, however long it takes to come."""
    pair.cluster.drop(NAME, "b-other")
    until(lambda: pair.gateway.metric("medusa_gateway_ready_instances") == 1)
    body = {"prompt": PROMPT, **GREEDY, "max_tokens": 300}
    stream = Stream(pair.gateway, "/v1/completions", body)
    stream.take(5)
    pair.victim.signal(signal.SIGKILL)
    time.sleep(1.0)
    pair.cluster.drop(NAME, "a-victim")
    pair.cluster.add(NAME, "c-successor", start_instance(ready=False).url)
    stream.rest()
    assert stream.error is None
    assert stream.texts() == pair.alone("/v1/completions", body)


def test_a_stream_that_ends_with_an_error_counts_as_one(
    cluster: StandIn, start_gateway: Start, start_instance: Start
) -> None:
    victim = start_instance()
    cluster.deploy(NAME)
    cluster.add(NAME, "a-victim", victim.url)
    gateway = start_gateway("--hold-s", "1")
    stream = Stream(gateway, "/v1/completions", {"prompt": PROMPT, **GREEDY, "max_tokens": 400})
    stream.take(5)
    victim.signal(signal.SIGKILL)
    stream.rest()
    assert stream.error is not None
    assert "the last one that was tried was lost: a-victim" in stream.error["message"]
    until(lambda: gateway.metric("medusa_gateway_requests_total") == 1, gateway.output)
    assert gateway.metric("medusa_gateway_requests_total", status="503") == 1
    assert gateway.metric("medusa_gateway_cancelled_total") == 0


@pytest.mark.slow
def test_a_request_that_ends_three_instances_is_not_given_to_a_fourth(
    cluster: StandIn, start_gateway: Start, start_instance: Start, served: tuple[Instance, ...]
) -> None:
    gateway = start_gateway()
    cluster.deploy(NAME)
    victims = {f"victim-{number}": start_instance() for number in range(3)}
    for name, victim in victims.items():
        cluster.add(NAME, name, victim.url)
    stream = Stream(gateway, "/v1/completions", {"prompt": PROMPT, **GREEDY, "max_tokens": 450})
    killed = 0
    while killed < 3:
        until(lambda: len(cluster.calls) > killed)  # noqa: B023 it is called here
        victims[cluster.calls[killed][0]].signal(signal.SIGKILL)
        killed += 1
        if killed == 2:
            cluster.add(NAME, "z-healthy", served[0].url)
    stream.rest()
    assert stream.error is not None
    assert stream.error["code"] == "instance_lost"
    assert "z-healthy" not in [name for name, _ in cluster.calls]


def test_the_last_routes_serve_while_the_controller_is_away(pair: Pair) -> None:
    pair.cluster.away = True
    until(lambda: pair.gateway.metric("medusa_gateway_controller_away_seconds") > 0)
    status, answer = pair.gateway.post("/v1/completions", {"model": NAME, "prompt": PROMPT, "max_tokens": 2})
    assert status == 200, answer
    assert pair.gateway.get("/readyz")[0] == 200
    pair.cluster.away = False
    until(lambda: pair.gateway.metric("medusa_gateway_controller_away_seconds") == 0)


@pytest.mark.slow
def test_the_end_of_one_gateway_is_nothing_to_the_other(pair: Pair, start_gateway: Start) -> None:
    second = start_gateway("--name", "second")
    body = {"prompt": PROMPT, **GREEDY, "max_tokens": 300}
    stream = Stream(second, "/v1/completions", body)
    stream.take(5)
    pair.gateway.kill()
    stream.rest()
    assert stream.error is None
    assert stream.texts() == pair.alone("/v1/completions", body)
    assert "second" in pair.cluster.loads
    assert second.stop() == 0
