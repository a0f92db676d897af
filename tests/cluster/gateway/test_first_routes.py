"""Requests that come to a gateway before it has reached the controller are held like all others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster_stand_in import StandIn
from fork_server import ForkServer
from gateway_fixtures import NAME, GatewayProcess, Instance
from waiting import until

REQUEST = {"model": NAME, "prompt": "def f(", "max_tokens": 2}
Start = Callable[..., GatewayProcess]


def test_a_request_waits_for_the_first_routes(
    cluster: StandIn, start_gateway: Start, served: tuple[Instance, ...]
) -> None:
    cluster.away = True
    cluster.deploy(NAME)
    cluster.add(NAME, "one", served[0].url)
    gateway = start_gateway("--max-waiting", "2", ready=False)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(gateway.post, "/v1/completions", REQUEST) for _ in range(3)]
        until(lambda: any(one.done() for one in asked))
        (refused,) = [one for one in asked if one.done()]
        status, answer = refused.result()
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        assert "2 requests wait for that, as many as may" in answer["error"]["message"]
        assert gateway.get(f"/v1/models/{NAME}")[0] == 503
        cluster.away = False
        assert [one.result(60)[0] for one in asked if one is not refused] == [200, 200]


def test_the_list_of_models_waits_for_the_first_routes(cluster: StandIn, start_gateway: Start) -> None:
    cluster.away = True
    cluster.deploy(NAME)
    gateway = start_gateway("--max-waiting", "2", ready=False)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(gateway.get, f"/v1/models{name}") for name in ("", f"/{NAME}", "/other")]
        until(lambda: any(one.done() for one in asked))  # beyond the two that may wait
        cluster.away = False
        found = [one.result(60) for one in asked]
    assert sorted(status for status, _ in found) in ([200, 200, 503], [200, 404, 503])
    assert gateway.get("/v1/models")[1]["data"][0]["id"] == NAME
    for (status, answer), path in zip(found, ("list", "one", "other"), strict=True):
        if status == 200:
            assert (answer["data"][0] if path == "list" else answer)["id"] == NAME


def test_a_request_does_not_wait_for_ever_for_the_first_routes(cluster: StandIn, start_gateway: Start) -> None:
    cluster.away = True
    gateway = start_gateway("--hold-s", "0.5", ready=False)
    status, headers, answer = gateway.exchange("POST", "/v1/completions", REQUEST)
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert "has not reached the cluster's controller in time" in answer["error"]["message"]
    assert int(headers["retry-after"]) >= 1


def test_a_gateway_that_stops_refuses_what_waits_for_the_first_routes(cluster: StandIn, start_gateway: Start) -> None:
    cluster.away = True
    gateway = start_gateway("--max-waiting", "1", "--drain-s", "0.5", ready=False)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(gateway.post, "/v1/completions", REQUEST) for _ in range(2)]
        until(lambda: any(one.done() for one in asked))  # beyond the one that may wait
        assert gateway.stop() == 1
        found = [one.result(60) for one in asked]
    assert [status for status, _ in found] == [503, 503]
    assert any("is stopping" in answer["error"]["message"] for _, answer in found)


def test_a_gateway_says_what_is_wrong_with_its_token_or_its_address(
    cluster: StandIn, start_gateway: Start, cluster_fork_server: ForkServer, tmp_path: Path
) -> None:
    gateway = start_gateway(ready=False)
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("the-token-of-another-cluster")
    places = {
        f"{cluster.url} refused the token; expected the cluster's": (cluster.url, wrong),
        f"{gateway.url} is no node server, but perhaps a gateway": (gateway.url, tmp_path / "token"),
    }
    for told, (url, token) in places.items():
        started = GatewayProcess(
            tmp_path, url.removeprefix("http://"), token, ready=False, fork_server=cluster_fork_server
        )
        try:
            until(lambda told=told, started=started: told in started.output(), started.output)  # type: ignore[misc]
        finally:
            started.kill()
