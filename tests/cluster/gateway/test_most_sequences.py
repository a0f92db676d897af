"""Requests for more sequences than an instance can ever admit: its refusal is the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, Instance


def body(sequences: int) -> dict[str, Any]:
    return {"model": NAME, "prompt": "def", "max_tokens": 2, "temperature": 0, "n": sequences}


def test_more_sequences_than_an_instance_holds_get_its_refusal_at_once(
    cluster: StandIn, start_gateway: Callable[..., GatewayProcess], start_instance: Callable[..., Instance]
) -> None:
    cluster.deploy(NAME)
    cluster.add(NAME, "one", start_instance("--max-concurrency", "1", "--max-waiting", "1").url)
    gateway = start_gateway()
    status, answer = gateway.post("/v1/completions", body(3))
    assert (status, answer["error"]["param"]) == (400, "n")
    assert answer["error"]["message"] == "expected at most 2 sequences, found 1 prompts x 3"
    assert gateway.metric("medusa_gateway_retries_total") == 0
    assert gateway.post("/v1/completions", body(2))[0] == 200
