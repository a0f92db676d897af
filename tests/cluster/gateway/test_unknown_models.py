"""A gateway asks the controller before it says that a model does not exist."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess
from waiting import until


@pytest.fixture
def gateway(cluster: StandIn, start_gateway: Callable[..., Any]) -> GatewayProcess:
    cluster.deploy(NAME)
    started: GatewayProcess = start_gateway()
    return started


def test_a_model_that_was_deployed_just_now_exists(gateway: GatewayProcess, cluster: StandIn) -> None:
    cluster.slow_routes = True
    cluster.change()  # ends the call that waits for new routes
    for number in range(10):
        cluster.deploy(f"new-{number}")
        assert gateway.get(f"/v1/models/new-{number}")[0] == 200


def test_an_unknown_model_may_exist_while_the_controller_is_away(gateway: GatewayProcess, cluster: StandIn) -> None:
    cluster.away = True
    status, answer = gateway.get("/v1/models/unheard-of")
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert gateway.get(f"/v1/models/{NAME}")[0] == 200
    cluster.away = False
    until(lambda: gateway.get("/v1/models/unheard-of")[0] == 404)


def test_a_flood_of_unknown_models_is_no_flood_for_the_controller(gateway: GatewayProcess, cluster: StandIn) -> None:
    gateway.get(f"/v1/models/{NAME}")
    before, began = cluster.reports, time.monotonic()
    for number in range(20):
        assert gateway.get(f"/v1/models/unknown-{number}")[0] == 404
    assert cluster.reports - before <= 3 + 10 * (time.monotonic() - began)
