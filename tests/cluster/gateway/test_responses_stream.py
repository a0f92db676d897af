"""The Responses API through a gateway: its streams end without [DONE], and go on when an instance is lost."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, Instance
from waiting import until

Start = Callable[..., Any]
LONG = 480  # tokens
ASKED: dict[str, Any] = {
    "model": NAME,
    "input": "This function returns",
    "max_output_tokens": 120,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
def gateway(cluster: StandIn, start_gateway: Start, served: tuple[Instance, ...]) -> GatewayProcess:
    found: GatewayProcess = start_gateway()
    cluster.deploy(NAME)
    cluster.add(NAME, "b-other", served[0].url)
    until(lambda: found.metric("medusa_gateway_ready_instances") == 1, found.output)
    return found


@contextlib.contextmanager
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{gateway.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as found:
        yield found


def test_a_stream_and_a_whole_answer_are_passed_on(gateway: GatewayProcess) -> None:
    asked = ASKED | {"temperature": 0}
    with client(gateway) as found:
        whole = found.responses.create(**asked)
        with found.responses.stream(**asked) as events:
            types = [event.type for event in events]
        assert types[-1] == "response.incomplete"
        assert types.count("response.output_text.delta") >= 100  # some tokens have no text
        assert whole.usage is not None
        assert whole.usage.output_tokens == 120
    assert gateway.metric("medusa_gateway_retries_total", reason="lost") == 0
    assert gateway.metric("medusa_gateway_tokens_total") >= 220


@pytest.mark.parametrize("lost", ["instance", "engine"])
def test_a_stream_goes_on_after_its_instance_was_lost(
    cluster: StandIn, gateway: GatewayProcess, start_instance: Start, lost: str
) -> None:
    victim = start_instance()
    asked = ASKED | {"max_output_tokens": LONG}
    with client(gateway) as found:
        for _ in found.responses.create(stream=True, **asked):
            pass  # the package has what it makes for its first stream; it took longer than the victim's whole answer
        cluster.add(NAME, "a-victim", victim.url)
        until(lambda: gateway.metric("medusa_gateway_ready_instances") == 2, gateway.output)
        texts, names = [], set()
        last: Any = None
        for event in found.responses.create(stream=True, **asked):  # without a seed: the gateway gives it one
            last = event
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
                names.add(event.item_id)
                if len(texts) == 5:
                    victim.signal(signal.SIGKILL) if lost == "instance" else victim.signal_role(
                        "engine", signal.SIGKILL
                    )
    assert last.type == "response.incomplete", json.dumps(last.model_dump(), default=str)
    assert last.response.output_text == "".join(texts)
    assert last.response.usage.output_tokens == LONG
    assert names == {last.response.output[0].id}
    assert gateway.metric("medusa_gateway_retries_total", reason="lost") == 1
