"""A model that is deployed again while it is asked, on a real head and node: Ray, the controller, agents, a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import MODEL, ClusterNode
from gateway_fixtures import GatewayProcess, Stream
from medusa_cluster.json_lines import call
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME = "m"
ASKED = {"model": NAME, "prompt": "This function returns", "max_tokens": 4, "temperature": 0}
Nodes = tuple[ClusterNode, ClusterNode]


class Asking:
    """Sends one request after the other, and notes the status and the revision of each answer."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.answers: list[tuple[int, str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            status, headers, _ = self.gateway.exchange("POST", "/v1/completions", ASKED)
            self.answers.append((status, headers.get("medusa-revision", "")))

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def until_answered(self, revision: str) -> None:
        until(lambda: self.answers[-1:] == [(200, revision)], lambda: str(self.answers[-3:]))


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
def asking(nodes: Nodes, tmp_path: Path) -> Iterator[Asking]:
    """Requests for a model that is deployed and answers."""
    head, other = nodes
    revision = deploy(head)
    gateway = GatewayProcess(tmp_path, other.address, head.token_file)
    try:
        with Asking(gateway) as found:
            found.until_answered(revision)
            yield found
    finally:
        gateway.kill()
        head.call("remove", name=NAME)
        until(lambda: not any(head.status_of(node.name).get("instances") for node in nodes), head.output)
        assert "Traceback" not in gateway.output()


def deploy(head: ClusterNode, url: Path = MODEL, **settings: str) -> str:
    """Deploy a model, and return its revision."""
    found: str = head.call("deploy", name=NAME, url=str(url), min=1, settings=settings)["revision"]
    return found


def replacing(head: ClusterNode) -> str:
    return head.call("status")["models"][0]["replacing"] or ""


def pids(nodes: Nodes, revision: str) -> list[int]:
    """The processes of a deployment's instances."""
    found: list[dict[str, Any]] = []
    for node in nodes:
        found += asyncio.run(call(node.folder / "control.sock", {"op": "status"}))["instances"]
    return [item["pid"] for item in found if item["deployment"] == revision and item["state"] != "failed"]


def test_requests_are_answered_all_the_time_by_the_old_revision_and_then_by_the_new_one(
    nodes: Nodes, asking: Asking
) -> None:
    head, _ = nodes
    old = asking.answers[-1][1]
    began = len(asking.answers)
    stream = Stream(asking.gateway, "/v1/completions", ASKED | {"max_tokens": 400, "ignore_eos": True})
    stream.take(3)
    done = head.medusa("deploy", NAME, "--model", str(MODEL), "--min", "1", "--set", "max-concurrency=4", "--wait")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert second.startswith("1 instance can answer, after ")
    new = first.split()[-1]
    status = head.call("status")["models"][0]
    assert (status["revision"], status["instances"] > 0, status["replacing"]) == (new, True, None)
    assert new != old
    asking.until_answered(new)
    stream.rest()
    assert stream.error is None
    until(lambda: len(asking.answers) > began + 30)
    answers = asking.answers[began:]
    assert {status for status, _ in answers} == {200}
    assert [revision for revision, _ in groupby(revision for _, revision in answers)] == [old, new]
    until(lambda: not pids(nodes, old))
    assert f"revision {new}" in head.medusa("status").stdout


def test_a_model_that_does_not_load_replaces_nothing_and_the_status_says_why(
    nodes: Nodes, asking: Asking, tmp_path: Path
) -> None:
    head, _ = nodes
    old = asking.answers[-1][1]
    began = len(asking.answers)
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    done = head.medusa("deploy", NAME, "--model", str(broken), "--min", "1", "--wait", "8")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{NAME} is not ready after 8 s: 0 of 1 can answer, and 1 of an earlier deployment" in line
    until(lambda: "are not those of the model" in replacing(head), lambda: replacing(head))
    done = head.medusa("deploy", NAME, "--model", str(broken), "--min", "1", "--wait", "0.5")
    assert "the last try failed: " in done.stderr
    assert "the checkpoint's tensors are not those of the model" in done.stderr
    shown = [line for line in head.medusa("status").stdout.splitlines() if line.startswith("    replaces ")]
    assert len(shown) == 1
    assert f"one instance of revision {old}" in shown[0]
    assert "are not those of the model" in shown[0]
    assert set(asking.answers[began:]) == {(200, old)}
    assert deploy(head) == old  # back to what serves
    until(lambda: not replacing(head))
    until(lambda: len(asking.answers) > began + 60)
    assert set(asking.answers[began:]) == {(200, old)}


def test_a_first_deployment_that_does_not_load_is_explained(nodes: Nodes, tmp_path: Path) -> None:
    head, _ = nodes
    shutil.copytree(MODEL, tmp_path / "broken")
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    head.call("deploy", name="broken", url=str(tmp_path / "broken"), min=1)
    try:
        until(lambda: "    the last try failed: broken-" in head.medusa("status").stdout, head.output)
        (text,) = [one["failure"] for one in head.call("status")["models"] if one["name"] == "broken"]
        assert "the checkpoint's tensors are not those of the model" in text
        wrong = head.medusa("deploy", "broken", "--model", str(MODEL), "--min", "1", "--wait", "0")
        assert "--wait=0: expected seconds above 0" in wrong.stderr
        done = head.medusa("deploy", "broken", "--model", str(MODEL), "--min", "1", "--wait")
        assert done.returncode == 0, done.stderr
        assert "the last try failed" not in head.medusa("status").stdout
    finally:
        head.call("remove", name="broken")
        until(lambda: not any(head.status_of(node.name).get("instances") for node in nodes), head.output)


def test_a_new_instance_that_is_killed_while_it_loads_is_started_again(nodes: Nodes, asking: Asking) -> None:
    head, _ = nodes
    old = asking.answers[-1][1]
    began = len(asking.answers)
    new = deploy(head, max_concurrency="4")
    (pid,) = until(lambda: pids(nodes, new))
    os.kill(pid, signal.SIGKILL)
    asking.until_answered(new)
    answers = asking.answers[began:]
    assert {status for status, _ in answers} == {200}
    assert [revision for revision, _ in groupby(revision for _, revision in answers)] == [old, new]
    assert any("ended by itself" in event["text"] for event in head.call("status")["events"])


def test_on_one_node_both_stand_beside_each_other(nodes: Nodes, asking: Asking) -> None:
    head, other = nodes
    began, old = len(asking.answers), asking.answers[-1][1]
    (used,) = [node for node in nodes if head.status_of(node.name)["instances"]]
    unused = other if used is head else head
    head.call("deploy", name="another", url=str(MODEL), min=1)  # which has the other node
    until(lambda: head.ready_instance("another"))
    try:
        new = deploy(head, max_concurrency="4")
        asking.until_answered(new)
        assert [item["model"] for item in head.status_of(unused.name)["instances"]] == ["another"]
        answers = asking.answers[began:]
        assert {status for status, _ in answers} == {200}
        assert [revision for revision, _ in groupby(revision for _, revision in answers)] == [old, new]
    finally:
        head.call("remove", name="another")
