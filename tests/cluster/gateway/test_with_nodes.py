"""A gateway in front of a real cluster: a head and a node, Ray, the controller, instances that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import ClusterNode
from gateway_fixtures import MODEL, NAME, GatewayProcess, Stream
from medusa_cluster.json_lines import call
from medusa_runtime.errors import NoControllerError
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Nodes = tuple[ClusterNode, ClusterNode]

LONG = 2500  # tokens
ASKED = {"prompt": "This function returns", "seed": 7, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    head = ClusterNode("head", 0)
    other = None
    try:
        head.wait_ready()
        other = ClusterNode("n1", 1, head)
        other.wait_ready()
        until(lambda: head.status_of("n1").get("state") == "alive", head.output)
        yield head, other
    finally:
        for node in (other, head):
            if node is not None:
                node.close()


@pytest.fixture
def gateway(nodes: Nodes, tmp_path: Path) -> Iterator[GatewayProcess]:
    """One that asks the node which is not the head, with a model that has no instance yet."""
    head, other = nodes
    head.call("deploy", name=NAME, url=str(MODEL), min=0, max=2, settings={"max_concurrency": "2"})
    started = GatewayProcess(tmp_path, other.address, head.token_file)
    try:
        yield started
    finally:
        started.kill()
        head.call("remove", name=NAME)
        until(lambda: not any(head.status_of(node.name).get("instances") for node in nodes), head.output)
        assert "Traceback" not in started.output()


@pytest.fixture(scope="module")
def expected() -> Callable[[int], str]:
    """The text that one instance answers, without a cluster."""
    from gateway_fixtures import Instance

    known: dict[int, str] = {}

    def text(count: int) -> str:
        if count not in known:
            instance = Instance()
            try:
                instance.wait_ready()
                known[count] = instance.completion({"model": NAME, "max_tokens": count, **ASKED}).text
            finally:
                instance.close()
        return known[count]

    return text


def _tokens(stream: Stream, index: int) -> list[str]:
    choices = [choice for chunk in stream.chunks for choice in chunk["choices"] if choice["index"] == index]
    return [token for choice in choices for token in choice["logprobs"]["tokens"]]


def _pid(nodes: Nodes, instance: dict[str, Any]) -> int:
    node = next(node for node in nodes if node.name == instance["node"])
    status = asyncio.run(call(node.folder / "control.sock", {"op": "status"}))
    found: int = next(item["pid"] for item in status["instances"] if item["id"] == instance["id"])
    return found


def test_requests_bring_instances_up_and_none_is_lost_when_they_go(
    nodes: Nodes, gateway: GatewayProcess, expected: Callable[[int], str], tmp_path: Path
) -> None:
    head, _ = nodes
    stream = Stream(gateway, "/v1/completions", ASKED | {"max_tokens": 480})
    stream.take(3)
    # A burst beside it: more than one instance takes at a time.
    with ThreadPoolExecutor(12) as pool:
        asked = [
            pool.submit(gateway.post, "/v1/completions", {"model": NAME, "max_tokens": 60, **ASKED}) for _ in range(24)
        ]
        instance = until(lambda: head.ready_instance(NAME), head.output)
        os.kill(_pid(nodes, instance), signal.SIGKILL)
        stream.rest()
        answers = [one.result() for one in asked]
    assert stream.error is None
    assert stream.texts()[0] == expected(480)
    assert [status for status, _ in answers] == [200] * 24, answers
    assert {answer["choices"][0]["text"] for _, answer in answers} == {expected(60)}
    # The long stream may have ended before, and what waits at the node server for its first byte finds nothing there.
    until(lambda: sum(gateway.metric("medusa_gateway_retries_total", reason=one) for one in ("lost", "absent")) >= 1)
    # The page and the status know it all, and without work the last instance goes.
    assert NAME in gateway.get("/")[1]
    assert gateway.get("/cluster/status")[1]["gateways"]
    assert head.medusa("status", "--html", str(tmp_path / "cluster.html")).returncode == 0
    assert NAME in (tmp_path / "cluster.html").read_text()
    until(lambda: not head.call("routes")["models"][NAME]["instances"], head.output)
    assert gateway.post("/v1/completions", {"model": NAME, "max_tokens": 60, **ASKED})[0] == 200


def test_a_full_cache_brings_another_instance(nodes: Nodes, gateway: GatewayProcess) -> None:
    """There is room for many more requests at once, but not for their keys and values."""
    head, _ = nodes
    settings = {"max_concurrency": "64", "kv_cache_mb": "1", "max_batched_tokens": "64"}  # room for 512 tokens
    head.call("deploy", name=NAME, url=str(MODEL), min=0, max=2, settings=settings)
    asked = {"model": NAME, "max_tokens": 250, **ASKED, "prompt": 16 * ASKED["prompt"]}

    def served() -> int:
        found = head.call("routes")["models"][NAME]["instances"]
        return sum(item["state"] == "ready" for item in found)

    with ThreadPoolExecutor(8) as pool:
        answers = [gateway.post("/v1/completions", asked)]
        while served() < 2:
            answers += pool.map(lambda _: gateway.post("/v1/completions", asked), range(8))
    assert {status for status, _ in answers} == {200}
    shown = next(model for model in head.call("status")["models"] if model["name"] == NAME)
    assert shown["learned"]["prefill_tokens_per_s"] > 0


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    """The example with room for a stream that outlasts the start of another instance."""
    folder = tmp_path / "long"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LONG}))
    return folder


@pytest.mark.parametrize("drain_s", ["0", "600"])
def test_a_stream_goes_on_while_its_node_drains(
    nodes: Nodes, gateway: GatewayProcess, long_model: Path, drain_s: str
) -> None:
    """It moves to the other node when its time is up, or ends where it began; not a token is lost or doubled."""
    head, _ = nodes
    head.call("deploy", name=NAME, url=str(long_model), min=1, max=2)
    # With so much to say of each token, the whole answer does not fit into the buffers of its way.
    asked = ASKED | {"max_tokens": LONG, "n": 4, "logprobs": 20}
    status, whole = gateway.post("/v1/completions", {"model": NAME, **asked})
    assert status == 200, whole
    instance = until(lambda: head.ready_instance(NAME), head.output)
    on, lost = instance["node"], gateway.metric("medusa_gateway_retries_total", reason="lost")
    stream = Stream(gateway, "/v1/completions", asked)
    stream.take(3)
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(head.medusa, "drain", on, "--drain-s", drain_s)
        # A slow reader, which holds the instance up: of its answer's 9 MB, each of the two connections takes 4 at most.
        while (head.ready_instance(NAME) or instance)["node"] == on or (drain_s == "0" and not drained.done()):
            stream.take(1)
            time.sleep(0.01)
        read = len(stream.chunks)
        stream.rest()
        done = drained.result()
    try:
        assert (done.returncode, done.stdout) == (0, f"{on}: drained\n"), done.stderr
        assert stream.error is None
        assert read < 4 * LONG, "the stream was over before its node was drained"
        for choice in whole["choices"]:
            assert stream.texts()[choice["index"]] == choice["text"]
            assert _tokens(stream, choice["index"]) == choice["logprobs"]["tokens"]
        assert gateway.metric("medusa_gateway_retries_total", reason="lost") - lost == (drain_s == "0")
    finally:
        head.call("drain", node=on, undo=True)


@pytest.mark.parametrize("victim", ["ray::Controller", "ray::NodeActor", "gcs_server"])
def test_what_serves_no_request_may_die(
    nodes: Nodes, gateway: GatewayProcess, expected: Callable[[int], str], victim: str
) -> None:
    head, _ = nodes
    assert gateway.post("/v1/completions", {"model": NAME, "max_tokens": 8, **ASKED})[0] == 200
    stream = Stream(gateway, "/v1/completions", ASKED | {"max_tokens": 480})
    stream.take(3)
    killed = head.kill(victim)
    stream.rest()
    assert stream.error is None
    assert stream.texts()[0] == expected(480)
    status, answer = gateway.post("/v1/completions", {"model": NAME, "max_tokens": 60, **ASKED})
    assert status == 200, answer
    assert answer["choices"][0]["text"] == expected(60)
    # The controller outlives the GCS for a moment, and ends with it.
    until(lambda: [pid for pid, name in head.processes().items() if name.startswith(victim) and pid != killed])
    until(lambda: _has_controller(head), head.output)
    until(lambda: gateway.metric("medusa_gateway_controller_away_seconds") == 0, gateway.output)


def _has_controller(node: ClusterNode) -> bool:
    with contextlib.suppress(NoControllerError):
        node.call("routes")
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_is_lost_takes_no_request_with_it(
    nodes: Nodes, gateway: GatewayProcess, expected: Callable[[int], str], number: int
) -> None:
    """The node server is gone or stands still, with all that it started."""
    head, other = nodes
    head.call("scale", name=NAME, min=2, max=2)
    until(
        lambda: (
            {item["node"] for item in head.call("routes")["models"][NAME]["instances"] if item["state"] == "ready"}
            == {"head", "n1"}
        ),
        head.output,
    )
    streams = [Stream(gateway, "/v1/completions", ASKED | {"max_tokens": 480}) for _ in range(4)]
    processes = [other.process.pid, *other.processes()]
    for pid in processes:
        os.kill(pid, number)
    for stream in streams:
        stream.rest()
        assert stream.error is None
        assert stream.texts()[0] == expected(480)
    if number == signal.SIGSTOP:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
    else:
        other.end(signal.SIGKILL)
        other.start()
        other.wait_ready()
    until(lambda: head.status_of("n1")["state"] == "alive", other.output)
