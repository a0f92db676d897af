"""Anthropic's Messages API through a gateway: its streams go on when an instance is lost, and errors have its form."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, Instance
from waiting import until

Start = Callable[..., Any]
LONG = 480  # tokens
ASKED: dict[str, Any] = {
    "model": NAME,
    "system": "Be kind.",
    "messages": [{"role": "user", "content": "This function returns"}],
    "max_tokens": 120,
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
def client(gateway: GatewayProcess, key: str = "none") -> Iterator[Any]:
    import anthropic  # takes a second

    with anthropic.Anthropic(base_url=gateway.url, api_key=key, timeout=60, max_retries=0) as found:
        yield found


def test_streams_whole_answers_and_counts_are_passed_on(gateway: GatewayProcess) -> None:
    with client(gateway) as found:
        asked = ASKED | {"extra_body": {"ignore_eos": True, "temperature": 0}}
        whole = found.messages.create(**asked)
        with found.messages.stream(**asked) as events:
            final = events.get_final_message()
        assert final.content[0].text == whole.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 120)
        assert whole._request_id is not None
        counted = found.messages.count_tokens(**{name: ASKED[name] for name in ("model", "messages", "system")})
        assert counted.input_tokens == whole.usage.input_tokens
    assert gateway.metric("medusa_gateway_retries_total", reason="lost") == 0
    assert gateway.metric("medusa_gateway_tokens_total") >= 220


def test_errors_have_anthropics_form(gateway: GatewayProcess) -> None:
    import anthropic

    with client(gateway) as found:
        with pytest.raises(anthropic.NotFoundError) as missing:
            found.messages.create(**ASKED | {"model": "unheard-of"})
        assert missing.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content"):
            found.messages.create(**ASKED | {"messages": [{"role": "user", "content": 3}]})


def test_the_gateways_token_comes_as_an_api_key(
    cluster: StandIn, start_gateway: Start, served: tuple[Instance, ...], tmp_path: Path
) -> None:
    import anthropic

    file = tmp_path / "client-token"
    file.touch(mode=0o600)
    file.write_text("what-every-client-must-show")
    gateway = start_gateway("--client-token-file", str(file))
    cluster.deploy(NAME)
    cluster.add(NAME, "one", served[0].url)
    with client(gateway, "wrong") as found, pytest.raises(anthropic.AuthenticationError) as refused:
        found.messages.create(**ASKED)
    assert refused.value.type == "authentication_error"
    with client(gateway, "what-every-client-must-show") as found:
        assert found.messages.create(**ASKED).content


@pytest.mark.parametrize("lost", ["instance", "engine"])
def test_a_stream_goes_on_after_its_instance_was_lost(
    cluster: StandIn, gateway: GatewayProcess, start_instance: Start, lost: str
) -> None:
    victim = start_instance()
    with client(gateway) as found:
        for _ in found.messages.create(stream=True, **ASKED):
            pass  # the package has what it makes for its first stream
        cluster.add(NAME, "a-victim", victim.url)
        until(lambda: gateway.metric("medusa_gateway_ready_instances") == 2, gateway.output)
        names, texts, types = set(), [], []
        for event in found.messages.create(stream=True, **ASKED | {"max_tokens": LONG}):  # the gateway gives it a seed
            types.append(event.type)
            if event.type == "message_start":
                names.add(event.message.id)
            elif event.type == "message_delta":
                assert (event.delta.stop_reason, event.usage.output_tokens) == ("max_tokens", LONG)
            elif event.type == "content_block_delta":
                texts.append(event.delta.text)
                if len(texts) == 5:
                    victim.signal(signal.SIGKILL) if lost == "instance" else victim.signal_role(
                        "engine", signal.SIGKILL
                    )
    assert types[-2:] == ["message_delta", "message_stop"]
    assert (len(names), types.count("content_block_start")) == (1, 1)
    assert len(texts) > 400  # some tokens have no text
    assert gateway.metric("medusa_gateway_retries_total", reason="lost") == 1


def test_the_end_of_all_tries_is_an_error_event(
    cluster: StandIn, gateway: GatewayProcess, start_instance: Start
) -> None:
    import anthropic

    victim = start_instance()
    cluster.remove(NAME)
    cluster.deploy(NAME)
    cluster.add(NAME, "a-victim", victim.url)
    until(lambda: gateway.metric("medusa_gateway_ready_instances") == 1, gateway.output)
    with client(gateway) as found:
        events = iter(found.messages.create(stream=True, **ASKED | {"max_tokens": LONG}))
        for _ in range(5):
            next(events)
        victim.signal(signal.SIGKILL)
        cluster.remove(NAME)
        with pytest.raises(anthropic.APIStatusError) as raised:
            list(events)
    assert raised.value.type in ("not_found_error", "overloaded_error")
