"""A head and a node as users start them: Ray, agents, node servers, the controller, and instances."""

from __future__ import annotations

import asyncio
import contextlib
import http
import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import MODEL, ClusterNode, complete, environment
from medusa_cluster.json_lines import call
from medusa_runtime.errors import ConfigError, MedusaError, NoControllerError, UnknownNameError
from process_tree import Unloaded, alive, children, stopped
from waiting import until

from benchmarks.origin import Origin, Variant

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME = "tiny"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    """A store with the model at ``/model``, which counts what it sends."""
    folder: Path = tmp_path_factory.mktemp("origin")
    shutil.copytree(MODEL, folder / "served" / "model")
    with Origin(folder / "served", folder / "scratch", Variant("plain"), builtin=True, counting=True) as origin:
        yield origin


# SIGUSR1 has the event loops of a node server, of the controller and of a node actor wait for a lock for ever.
DEADLOCK = """
import signal, sys, threading

def deadlock(*_):
    import asyncio, gc
    loops = [loop for loop in gc.get_objects() if isinstance(loop, asyncio.AbstractEventLoop) and loop.is_running()]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lock = threading.Lock()
    lock.acquire()
    for loop in loops:
        if names.get(loop._thread_id) in ("AsyncIO Thread: control", "AsyncIO Thread: default", "MainThread"):
            loop.call_soon_threadsafe(lock.acquire)

if {"default_worker.py", "cluster"} & {word.rpartition("/")[2] for word in sys.orig_argv}:
    signal.signal(signal.SIGUSR1, deadlock)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ClusterNode, ClusterNode]]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(DEADLOCK)
    head = ClusterNode("head", 0, environ={"PYTHONPATH": str(folder)})
    other = None
    try:
        head.wait_ready()
        flags = ("--device-kind", "special")
        other = ClusterNode("n1", 1, head, flags=flags, environ={"PYTHONPATH": str(folder)})
        other.wait_ready()
        until(lambda: head.status_of("n1").get("state") == "alive", head.output)
        yield head, other
    finally:
        for node in (other, head):
            if node is not None:
                node.close()


@pytest.fixture
def deployed(nodes: tuple[ClusterNode, ClusterNode], origin: Origin) -> Iterator[tuple[ClusterNode, ClusterNode]]:
    head, _ = nodes
    head.call("deploy", name=NAME, url=origin.url + "/model", min=1, max=2)
    until(lambda: head.ready_instance(NAME), head.output)
    yield nodes
    head.call("remove", name=NAME)
    until(lambda: not any(head.status_of(node.name).get("instances") for node in nodes), head.output)


def _serving(node: ClusterNode) -> str:
    """The text that an instance answers."""
    instance = until(lambda: node.ready_instance(NAME), node.output)
    found: str = complete(instance["url"], node.headers())["choices"][0]["text"]
    return found


def test_a_model_is_deployed_asked_scaled_and_removed_by_commands(
    nodes: tuple[ClusterNode, ClusterNode], origin: Origin
) -> None:
    head, other = nodes
    done = head.medusa("deploy", NAME, "--model", origin.url + "/model", "--max", "2")
    assert done.returncode == 0, done.stderr
    assert head.call("routes")["models"][NAME]["instances"] == []

    # A gateway reports a request; it starts no later than that.
    began = head.call("report", gateway="g", url=None, loads={NAME: {"waiting": 1}})
    assert [item["state"] for item in began["models"][NAME]["instances"]] == ["starting"]
    changed = other.call("routes", version=began["version"], wait_s=30)
    assert changed["version"] != began["version"]
    text = _serving(other)

    assert other.medusa("scale", NAME, "--min", "2").returncode == 0
    instances = until(
        lambda: [item for item in head.call("routes")["models"][NAME]["instances"] if item["state"] == "ready"][1:],
        head.output,
    )
    assert complete(instances[0]["url"], head.headers())["choices"][0]["text"] == text
    shown = other.medusa("status").stdout
    assert f"{NAME}: 2 of 2 to 2 instances" in shown
    assert "copies on head, n1" in shown or "copies on n1, head" in shown

    assert head.medusa("remove", NAME).returncode == 0
    until(lambda: not any(head.status_of(node.name)["instances"] for node in nodes), head.output)
    assert json.loads(head.medusa("status", "--json").stdout)["models"] == []


def test_a_model_starts_on_the_kind_of_device_that_it_needs(
    nodes: tuple[ClusterNode, ClusterNode], origin: Origin
) -> None:
    head, _ = nodes
    url = origin.url + "/model"
    done = head.medusa("deploy", NAME, "--model", url, "--min", "1", "--max", "2", "--device-kind", "special")
    assert done.returncode == 0, done.stderr
    instance = until(lambda: head.ready_instance(NAME), head.output)
    assert instance["node"] == "n1", "where there is room on the head, too"
    began = head.call("report", gateway="g", url=None, loads={NAME: {"waiting": 100}})
    assert len(began["models"][NAME]["instances"]) == 1
    head.call("remove", name=NAME)
    until(lambda: not any(head.status_of(node.name).get("instances") for node in nodes), head.output)


def test_weights_come_from_the_other_node(deployed: tuple[ClusterNode, ClusterNode], origin: Origin) -> None:
    head, other = deployed
    _serving(head)
    until(lambda: head.call("status")["models"][0]["copies"], head.output)
    sent = origin.sent_bytes()
    head.call("scale", name=NAME, min=2)
    until(lambda: len(head.call("status")["models"][0]["copies"]) == 2, head.output)
    assert origin.sent_bytes() - sent < 100_000  # what shows that the version is still the same
    for node, holder in ((head, other), (other, head)):  # whatever its plan was: who asks again learns of the other one
        until(partial(_finds, node, origin.url + "/model", holder), head.output)


def _finds(node: ClusterNode, url: str, holder: ClusterNode) -> bool:
    """Return whether a node is told to read a model from ``holder`` when it asks again."""
    found = asyncio.run(call(node.folder / "control.sock", {"op": "sources", "url": url, "again": True}))
    return bool(found == [f"http://{holder.address}"])


def test_logs_of_all_nodes_are_shown_by_model_by_node_and_by_name(
    deployed: tuple[ClusterNode, ClusterNode],
) -> None:
    head, other = deployed
    instance = until(lambda: head.ready_instance(NAME), head.output)
    log = f"{instance['node']}/instance-{instance['id']}"
    listed = {line.split()[0] for line in other.medusa("logs").stdout.splitlines()}
    assert {"head/node", "head/agent", "head/controller", "head/ray", "n1/node", "n1/agent", "n1/ray", log} <= listed
    for name in (NAME, instance["id"], log):
        assert "listening on http://127.0.0.1:" in other.medusa("logs", name).stdout, name
    shown = other.medusa("logs", "head", "--lines", "1").stdout.splitlines()
    assert [line.partition(": ")[0] for line in shown].count("head/agent") == 1
    assert any(line.startswith("head/controller: ") and f"{instance['id']} starts on" in line for line in shown)
    unknown = other.medusa("logs", "nothing")
    assert unknown.returncode == 1
    assert "nothing is logged of 'nothing'" in unknown.stderr

    head.call("remove", name=NAME)
    done = head.medusa("deploy", NAME, "--model", str(MODEL), "--min", "1", "--set", "log-format=json")
    assert done.returncode == 0, done.stderr
    until(lambda: head.ready_instance(NAME) not in (None, instance), head.output)
    lines = [json.loads(line) for line in head.medusa("logs", NAME).stdout.splitlines()]
    assert [line["message"].partition(" http")[0] for line in lines][:2] == ["listening on", "ready on"]


def test_logs_of_other_nodes_are_shown_while_one_is_stopped(nodes: tuple[ClusterNode, ClusterNode]) -> None:
    head, other = nodes
    stopped = [other.process.pid, *other.processes()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(2):  # while the node is waited for, and when it is known to be lost
            shown = head.medusa("logs", "head", "--lines", "1")
            assert "head/controller: " in shown.stdout
            assert shown.stderr.startswith("n1 is left out: ")
            assert shown.stderr.count("\n") == 1
            until(lambda: head.status_of("n1")["state"] == "lost", head.output)
        assert "the node n1 has not answered for" in shown.stderr
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    until(lambda: head.status_of("n1")["state"] == "alive", head.output)
    assert "n1/node: " in other.medusa("logs", "n1").stdout


def test_a_node_is_drained_without_a_request_lost(deployed: tuple[ClusterNode, ClusterNode]) -> None:
    head, other = deployed
    text = _serving(head)
    on = until(lambda: head.ready_instance(NAME), head.output)["node"]
    done = other.medusa("drain", on)
    assert (done.returncode, done.stdout) == (0, f"{on}: drained\n"), done.stderr
    assert head.status_of(on)["instances"] == []
    assert until(lambda: head.ready_instance(NAME), head.output)["node"] != on
    assert _serving(head) == text
    assert head.medusa("drain", on, "--undo").stdout == f"{on}: alive\n"


def test_requests_go_on_while_the_controller_is_dead_and_its_state_comes_back(
    deployed: tuple[ClusterNode, ClusterNode],
) -> None:
    head, _ = deployed
    instance = until(lambda: head.ready_instance(NAME), head.output)
    text = _serving(head)
    head.kill("ray::Controller")
    assert complete(instance["url"], head.headers())["choices"][0]["text"] == text
    back = until(lambda: _routes(head), head.output)
    assert [item["id"] for item in back["models"][NAME]["instances"]] == [instance["id"]]
    assert back["models"][NAME]["deployment"]["min"] == 1


def _routes(node: ClusterNode) -> dict[str, object] | None:
    try:
        found: dict[str, object] = node.call("routes")
        return found
    except NoControllerError:
        return None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    "victim", ["ray::NodeActor", "ray::Controller", "ray::DashboardA", "ray::RuntimeEnv", "torch-zygote"]
)
def test_what_dies_or_hangs_on_a_node_comes_back(
    deployed: tuple[ClusterNode, ClusterNode], victim: str, number: signal.Signals
) -> None:
    head, _ = deployed
    text = _serving(head)
    killed = head.kill(victim, number)
    until(lambda: [pid for pid, name in head.processes().items() if name.startswith(victim) and pid != killed])
    until(lambda: _routes(head), head.output)
    assert _serving(head) == text
    head.call("scale", name=NAME, min=2)
    until(lambda: head.call("status")["models"][0]["instances"] == 2, head.output)


@pytest.mark.parametrize("victim", ["ray::NodeActor", "ray::Controller", "node server"])
def test_what_is_stopped_is_killed_within_three_seconds(deployed: tuple[ClusterNode, ClusterNode], victim: str) -> None:
    head, other = deployed
    text = _serving(head)
    (server,) = children((other if victim == "node server" else head).process.pid)
    watcher, stopped_pid = (other.process.pid, server) if victim == "node server" else (server, _pid(head, victim))
    os.kill(stopped_pid, signal.SIGSTOP)
    clock, began = Unloaded(watcher), time.monotonic()
    until(lambda: not alive(stopped_pid) or stopped(stopped_pid))
    until(lambda: not alive(stopped_pid) or not stopped(stopped_pid))
    noticed_s, loaded_s = clock.passed_s(), time.monotonic() - began
    works = {"ray::Controller": lambda: _routes(head), "node server": lambda: _answers(other)}
    until(works.get(victim, lambda: _pid(head, victim) not in (None, stopped_pid)), head.output)
    replaced_s = time.monotonic() - began
    print(f"{victim}: killed {loaded_s:.2f} s after it was stopped, replaced after {replaced_s:.2f} s")
    assert noticed_s <= 3
    until(lambda: _alive_nodes(head) == ["head", "n1"], head.output)
    assert _serving(head) == text


@pytest.mark.parametrize("victim", ["ray::NodeActor", "ray::Controller", "node server"])
def test_what_is_deadlocked_is_killed_within_three_seconds(
    deployed: tuple[ClusterNode, ClusterNode], victim: str
) -> None:
    head, other = deployed
    text = _serving(head)
    (server,) = children((other if victim == "node server" else head).process.pid)
    hung = server if victim == "node server" else _pid(head, victim)
    assert hung is not None
    os.kill(hung, signal.SIGUSR1)
    clock, began = Unloaded(server), time.monotonic()
    until(lambda: clock.passed_s() and not alive(hung), head.output)  # a node server that hangs is its own watcher
    noticed_s, loaded_s = clock.passed_s(), time.monotonic() - began
    works = {"ray::Controller": lambda: _routes(head), "node server": lambda: _answers(other)}
    until(works.get(victim, lambda: _pid(head, victim) not in (None, hung)), head.output)
    replaced_s = time.monotonic() - began
    print(f"{victim}: killed {loaded_s:.2f} s after it was deadlocked, replaced after {replaced_s:.2f} s")
    assert noticed_s <= 3
    said = {"ray::NodeActor": f"the node actor (process {hung}) hangs", "node server": "the node server has hung"}
    assert (
        said.get(victim, f"the controller (process {hung}) hangs")
        in (head if victim != "node server" else other).output()
    )
    until(lambda: _alive_nodes(head) == ["head", "n1"], head.output)
    assert _serving(head) == text


def test_a_keeper_that_is_stopped_goes_on_within_three_seconds(deployed: tuple[ClusterNode, ClusterNode]) -> None:
    head, other = deployed
    (server,) = children(other.process.pid)
    os.kill(other.process.pid, signal.SIGSTOP)
    clock = Unloaded(server)
    until(lambda: stopped(other.process.pid))
    until(lambda: not stopped(other.process.pid), other.output)
    assert clock.passed_s() <= 3
    assert f"the keeper of the node server (process {other.process.pid})" in other.output()
    assert _alive_nodes(head) == ["head", "n1"]
    assert children(other.process.pid) == [server]


def test_a_node_whose_server_and_its_keeper_stand_still_is_lost_within_three_seconds(
    deployed: tuple[ClusterNode, ClusterNode],
) -> None:
    head, other = deployed
    text = _serving(head)
    frozen = [other.process.pid, *children(other.process.pid)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    clock, began = Unloaded(_pid(head, "ray::Controller") or 0), time.monotonic()
    until(lambda: head.status_of("n1")["state"] == "lost", head.output)
    lost_s = clock.passed_s()
    print(f"node: lost {time.monotonic() - began:.2f} s after its server and its keeper were stopped")
    assert lost_s <= 3
    assert _serving(head) == text
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    until(lambda: _alive_nodes(head) == ["head", "n1"], head.output)


def _pid(node: ClusterNode, name: str) -> int | None:
    return next((pid for pid, found in node.processes().items() if found.startswith(name)), None)


def _answers(node: ClusterNode) -> bool:
    """Return whether the node's server answers other nodes."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(node.host, node.port, timeout=1)
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            return connection.getresponse().status == http.HTTPStatus.OK
    return False


def _alive_nodes(node: ClusterNode) -> list[str]:
    with contextlib.suppress(MedusaError, OSError):
        return sorted(item["name"] for item in node.call("status")["nodes"] if item["state"] == "alive")
    return []


def test_an_instance_that_is_killed_is_replaced(deployed: tuple[ClusterNode, ClusterNode]) -> None:
    head, other = deployed
    text = _serving(head)
    instance = until(lambda: head.ready_instance(NAME), head.output)
    os.kill(_instance_pid(head if instance["node"] == "head" else other, instance["id"]), signal.SIGKILL)
    until(lambda: (head.ready_instance(NAME) or instance)["id"] != instance["id"], head.output)
    assert "instance-died" in [event["kind"] for event in head.call("status")["events"]]
    assert _serving(head) == text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_go_on_while_the_head_has_no_ray_and_it_comes_back(
    deployed: tuple[ClusterNode, ClusterNode], number: signal.Signals
) -> None:
    head, _ = deployed
    instance = until(lambda: head.ready_instance(NAME), head.output)
    text = _serving(head)
    gcs = head.kill("gcs_server", number)
    until(lambda: gcs not in head.processes() or number == signal.SIGSTOP)
    assert complete(instance["url"], head.headers())["choices"][0]["text"] == text
    until(lambda: any(name == "gcs_server" and pid != gcs for pid, name in head.processes().items()), head.output)
    assert complete(instance["url"], head.headers())["choices"][0]["text"] == text
    back = until(lambda: _routes(head), head.output)
    assert instance["id"] in [item["id"] for item in back["models"][NAME]["instances"]]
    head.call("scale", name=NAME, min=2)
    until(lambda: head.call("status")["models"][0]["instances"] == 2, head.output)


def _instance_pid(node: ClusterNode, instance_id: str) -> int:
    status = asyncio.run(call(node.folder / "control.sock", {"op": "status"}))
    found: int = next(item["pid"] for item in status["instances"] if item["id"] == instance_id)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_is_killed_or_stopped_is_started_again(
    deployed: tuple[ClusterNode, ClusterNode], number: signal.Signals
) -> None:
    head, _ = deployed
    text = _serving(head)
    agent = next(pid for pid in head.processes() if "node\0--socket" in _command_line(pid))
    os.kill(agent, number)
    until(lambda: any("node\0--socket" in _command_line(pid) for pid in head.processes() if pid != agent), head.output)
    assert _serving(head) == text


def _command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def test_errors_of_calls_say_what_was_expected(nodes: tuple[ClusterNode, ClusterNode]) -> None:
    head, other = nodes
    with pytest.raises(UnknownNameError, match="no model is deployed as 'nothing'"):
        other.call("remove", name="nothing")
    with pytest.raises(ConfigError, match="min up to max"):
        head.call("deploy", name="m", url="/m", min=3, max=2)
    with pytest.raises(ConfigError, match="expected one of deploy"):
        head.call("nothing")
    assert "no node is called 'nothing'" in head.medusa("drain", "nothing").stderr


def test_nodes_serve_on_while_the_head_is_away_and_it_finds_them_again(
    deployed: tuple[ClusterNode, ClusterNode],
) -> None:
    head, other = deployed
    head.call("drain", node="head")
    until(lambda: [item["node"] for item in _instances(head)] == ["n1"], head.output)
    (instance,) = _instances(head)
    head.call("drain", node="head", undo=True)
    text = _serving(head)
    assert head.end(signal.SIGKILL) == -signal.SIGKILL
    assert complete(instance["url"], other.headers())["choices"][0]["text"] == text
    assert "is away" in other.medusa("status").stderr or "cannot be reached" in other.medusa("status").stderr
    head.start()
    head.wait_ready()
    until(lambda: head.status_of("n1").get("state") == "alive", head.output)
    assert instance["id"] in [item["id"] for item in _instances(head)]
    assert _serving(other) == text


def _instances(node: ClusterNode) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.call("routes")["models"][NAME]["instances"]
    return found


def test_a_killed_node_leaves_nothing_and_joins_again(deployed: tuple[ClusterNode, ClusterNode]) -> None:
    head, other = deployed
    processes = other.processes()
    other.process.kill()
    clock, began = Unloaded(_pid(head, "ray::Controller") or 0), time.monotonic()
    until(lambda: head.status_of("n1")["state"] == "lost", head.output)
    print(f"lost {time.monotonic() - began:.2f} s after its keeper was killed")
    assert clock.passed_s() <= 3
    until(lambda: not any(map(alive, processes)), lambda: str(list(filter(alive, processes))))
    assert other.process.wait() == -signal.SIGKILL
    assert "the node n1 is lost" in [event["text"].partition(",")[0] for event in head.call("status")["events"]]
    until(lambda: (head.ready_instance(NAME) or {}).get("node") == "head", head.output)
    assert _serving(head)
    other.start()
    other.wait_ready()
    until(lambda: head.status_of("n1")["state"] == "alive", other.output)


def test_a_node_with_a_wrong_token_does_not_join(nodes: tuple[ClusterNode, ClusterNode]) -> None:
    stranger = ClusterNode("stranger", 7, nodes[0], token="x" * 32)
    try:
        assert stranger.process.wait(30) == 1
        assert "refused the token" in stranger.output()
        assert stranger.output().count("\n") == 1
    finally:
        stranger.close()


def test_a_second_node_server_in_the_same_folder_is_refused(nodes: tuple[ClusterNode, ClusterNode]) -> None:
    head, _ = nodes
    done = subprocess.run(head.command(), env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert f"a node server runs in {head.folder} already (process {children(head.process.pid)[0]})" in done.stderr


def test_ctrl_c_ends_a_node_and_leaves_nothing(deployed: tuple[ClusterNode, ClusterNode]) -> None:
    head, other = deployed
    head.call("drain", node="head")
    until(lambda: (head.ready_instance(NAME) or {}).get("node") == "n1", head.output)
    assert other.end(signal.SIGINT) == 0
    until(lambda: head.status_of("n1")["state"] == "lost", head.output)
    head.call("drain", node="head", undo=True)
    other.start()
    other.wait_ready()


def test_a_node_with_the_name_of_another_one_is_refused(nodes: tuple[ClusterNode, ClusterNode]) -> None:
    stranger = ClusterNode("n1", 2, nodes[0])
    until(lambda: stranger.process.poll() is not None, stranger.output)
    assert stranger.process.returncode == 2
    assert f"another node of this cluster is called n1, at {nodes[1].address}" in stranger.output()
    stranger.close()
