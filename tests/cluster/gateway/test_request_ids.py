"""The id of a request, in its answer and in the gateway's log."""

from __future__ import annotations

import json
from collections.abc import Callable

from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, Instance
from waiting import until


def test_each_answer_has_an_id_that_the_log_has(
    start_gateway: Callable[..., GatewayProcess], cluster: StandIn, served: tuple[Instance, ...]
) -> None:
    cluster.deploy(NAME)
    cluster.add(NAME, "one", served[0].url)
    gateway = start_gateway("--access-log", "json")
    asked = {"model": NAME, "prompt": "a", "max_tokens": 1}
    _, headers, _ = gateway.exchange("POST", "/v1/completions", asked, {"X-Request-Id": "my-own"})
    assert headers["x-request-id"] == "my-own"
    assert headers["server"] == "medusa-runtime"
    _, refused, _ = gateway.exchange("POST", "/v1/completions", asked | {"model": "no"}, {"X-Request-Id": "my-other"})
    assert refused["x-request-id"] == "my-other"
    _, unnamed, _ = gateway.exchange("POST", "/v1/completions", asked)
    until(lambda: unnamed["x-request-id"] in gateway.output(), gateway.output)
    lines = [json.loads(line) for line in gateway.output().splitlines() if line.startswith("{")]
    found = {line["request_id"]: (line["method"], line["path"], line["status"], line["model"]) for line in lines}
    assert found["my-own"] == found[unnamed["x-request-id"]] == ("POST", "/v1/completions", 200, NAME)
    assert found["my-other"] == ("POST", "/v1/completions", 404, "")
