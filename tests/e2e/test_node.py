"""`medusa serve` beside a node agent that is there, dies at every step, or has never been there."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.node.attachment import Attachment
from medusa_runtime.node.messages import receive, send
from medusa_runtime.timeline import Timeline
from process_tree import alive, stopped
from slow_origin import SlowAfterAWhile, SlowOrigin, serving_origin

pytestmark = [pytest.mark.timeout(400), pytest.mark.forked]

Start = Callable[..., Any]
FALLBACK = "starting without the node agent"


class Middleman:
    """Stands between functions and the agent, and ends (or stops) the agent in front of one message.

    ``step`` is the message's name with the side it comes from, such as ``agent:hello``.
    """

    def __init__(self, node: Any, step: str, stop: bool = False) -> None:
        self.node = node
        self.step = step
        self.stop = stop
        self.path = str(node.folder / "middle.sock")
        self.seen: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                function, _ = self._listener.accept()
            except OSError:
                return
            with function, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
                try:
                    agent.connect(self.node.socket)
                except OSError:
                    continue  # it is dead, and its socket tells so
                back = threading.Thread(target=self._pass, args=("agent", agent, function))
                back.start()
                self._pass("function", function, agent)
                back.join()

    def _pass(self, name: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (message := receive(source)) is not None:
                step = f"{name}:{message.kind}"
                self.seen.append(step)
                if step == self.step and self.stop:
                    os.kill(self.node.process.pid, signal.SIGSTOP)
                elif step == self.step:
                    self.node.kill()
                    message.close()
                    break
                send(sink, message.kind, message.body, message.descriptors)
                message.close()
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)


@pytest.fixture
def middleman() -> Iterator[Callable[..., Middleman]]:
    made: list[Middleman] = []

    def make(node: Any, step: str, stop: bool = False) -> Middleman:
        made.append(Middleman(node, step, stop))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def slow_origin(example: Path) -> Iterator[SlowOrigin]:
    with serving_origin(example, 1e6, SlowAfterAWhile) as server:
        yield server


def stages(serving: Any) -> dict[str, list[dict[str, Any]]]:
    _, timeline, _ = serving.request("GET", "/timeline")
    found: dict[str, list[dict[str, Any]]] = {}
    for stage in timeline["stages"]:
        found.setdefault(stage["name"], []).append(stage)
    return found


def ready_node(start_node: Start, example: Path) -> Any:
    """An agent with the example in memory and a warm engine."""
    node = start_node("--prewarm", "torch=1")
    client = node.client()
    client.region(str(example)).close()
    client.close()
    node.wait_warm()
    node.until(lambda: [held["state"] for held in node.status()["regions"]] == ["done"])
    return node


@pytest.fixture(scope="module")
def shared(start_node_module: Start, example: Path) -> Iterator[Any]:
    """The agent of the tests in which no harm comes to it. It ends in order."""
    node = ready_node(start_node_module, example)
    yield node
    assert node.stop() == 0


@pytest.fixture
def node(shared: Any) -> Any:
    """The shared agent with a warm engine, and its region in nobody's use."""
    shared.wait_warm()
    shared.until(lambda: shared.status()["regions"][0]["in_use_by"] == 0)
    return shared


def taken(node: Any) -> int:
    """Return how many engines functions have taken so far."""
    return int(node.status()["engines"]["torch"]["taken"])


@pytest.mark.forked(False)
def test_a_function_takes_region_and_engine_from_the_agent(start: Start, node: Any, example: Path) -> None:
    before = taken(node)
    (warm,) = node.status()["engines"]["torch"]["pids"]
    serving = start("--model", example, "--node-socket", node.socket)
    with_agent = serving.complete()["choices"][0]["text"]
    names = stages(serving)
    assert names["engine"][0]["detail"] == {"source": "node", "pid": warm}
    assert "node-fallback" not in names
    assert set(serving.children().values()) == {"function", "worker", "templates"}, (
        "neither prefetcher nor zygote of its own"
    )
    engines = node.status()["engines"]["torch"]
    assert engines["taken"] == before + 1
    assert warm not in engines["pids"]
    # A second function gets another process, of which nobody else has had any use.
    node.wait_warm()
    (other,) = node.status()["engines"]["torch"]["pids"]
    assert other != warm
    second = start("--model", example, "--node-socket", node.socket)
    assert second.complete()["choices"][0]["text"] == with_agent
    assert stages(second)["engine"][0]["detail"]["pid"] == other
    (held,) = node.status()["regions"]
    assert held["in_use_by"] == 2
    assert serving.stop() == 0
    node.until(lambda: not alive(warm))
    assert alive(other)
    assert second.complete()["choices"][0]["text"] == with_agent
    assert second.stop() == 0
    node.until(lambda: not alive(other))
    node.until(lambda: node.status()["regions"][0]["in_use_by"] == 0)


def test_without_an_idle_engine_the_region_is_shared_all_the_same(
    start: Start, start_node: Start, example: Path
) -> None:
    node = start_node()
    serving = start("--model", example, "--node-socket", node.socket)
    assert serving.complete()["choices"][0]["text"]
    names = stages(serving)
    assert [stage["detail"]["reason"] for stage in names["node-fallback"]] == [
        "the node agent keeps no torch engines; start it with --prewarm torch=1"
    ]
    assert "prefetcher" not in serving.children().values()
    assert node.status()["regions"][0]["in_use_by"] == 1
    assert serving.stop() == 0
    assert node.stop() == 0


@pytest.mark.parametrize("step", ["function:hello", "agent:hello", "function:region", "agent:region"])
def test_attaching_to_an_agent_that_dies_on_the_way(
    start_node: Start, middleman: Callable[..., Middleman], example: Path, step: str
) -> None:
    middle = middleman(start_node(), step)
    timeline = Timeline.create("test")
    before = set(os.listdir("/proc/self/fd"))
    assert Attachment.attach(Settings(model=str(example), node_socket=middle.path), timeline) is None
    reasons = [stage.detail["reason"] for stage in timeline.stages() if stage.name == "node-fallback"]
    assert len(reasons) == 1
    assert "went away" in reasons[0]
    assert step in middle.seen
    middle.close()
    assert set(os.listdir("/proc/self/fd")) <= before, "descriptors left behind"
    timeline.close()


@pytest.mark.parametrize("step", ["function:engine", "agent:engine"])
def test_the_agent_dies_around_the_handing_over_of_an_engine(
    start: Start, start_node: Start, middleman: Callable[..., Middleman], example: Path, step: str
) -> None:
    node = ready_node(start_node, example)
    (warm,) = node.status()["engines"]["torch"]["pids"]
    middle = middleman(node, step)
    serving = start("--model", example, "--node-socket", middle.path)
    assert serving.complete()["choices"][0]["text"]
    assert step in middle.seen
    assert serving.output().count(FALLBACK) == 1
    assert {"zygote", "engine"} <= set(serving.children().values())
    node.until(lambda: not alive(warm))
    assert serving.stop() == 0


@pytest.mark.parametrize("step", ["function:hello", "function:region", "function:engine"])
def test_an_agent_that_hangs_at_any_step_is_done_without(
    start: Start, start_node: Start, middleman: Callable[..., Middleman], example: Path, step: str
) -> None:
    node = ready_node(start_node, example)
    (warm,) = node.status()["engines"]["torch"]["pids"]
    serving = start("--model", example, "--node-socket", middleman(node, step, stop=True).path)
    text = serving.complete()["choices"][0]["text"]
    assert stopped(node.process.pid), "the first token came without it"
    names = stages(serving)
    assert [stage["name"] for stage in names["node-fallback"]] == ["node-fallback"]
    assert f"did not answer {step.partition(':')[2]!r} within" in names["node-fallback"][0]["detail"]["reason"]
    assert names["node-fallback"][0]["start_ns"] < names["ready"][0]["start_ns"]
    assert "zygote" in serving.children().values()
    os.kill(node.process.pid, signal.SIGCONT)
    if step == "function:engine":  # it still hands one over, which ends: nobody holds its lease
        node.until(lambda: not alive(warm))
    assert serving.complete()["choices"][0]["text"] == text
    assert serving.stop() == 0
    node.until(lambda: node.status()["regions"][0]["in_use_by"] == 0)
    node.wait_warm()
    assert node.stop() == 0


def test_the_agent_dies_while_a_function_serves(start: Start, start_node: Start, example: Path) -> None:
    node = ready_node(start_node, example)
    (engine,) = node.status()["engines"]["torch"]["pids"]
    serving = start("--model", example, "--node-socket", node.socket)
    text = serving.complete()["choices"][0]["text"]
    node.kill()
    assert serving.complete()["choices"][0]["text"] == text
    assert alive(engine), "it belongs to the function now"
    other = start("--model", example, "--node-socket", node.socket)
    assert other.complete()["choices"][0]["text"] == text
    assert other.output().count(FALLBACK) == 1
    assert other.stop() == 0
    # The next agent is brought what the function still has.
    node.start()
    node.until(lambda: [held["in_use_by"] for held in node.status()["regions"]] == [1])
    assert serving.complete()["choices"][0]["text"] == text
    assert serving.stop() == 0
    node.until(lambda: not alive(engine))
    node.until(lambda: node.status()["regions"][0]["in_use_by"] == 0)
    assert node.stop() == 0


def test_a_region_is_brought_again_to_an_agent_that_was_too_slow(
    start: Start, start_node: Start, example: Path
) -> None:
    node = ready_node(start_node, example)
    serving = start("--model", example, "--node-socket", node.socket, "--log-level", "debug")
    serving.complete()
    os.kill(serving.process.pid, signal.SIGSTOP)  # it looks for the next agent only when that one cannot answer
    node.kill()
    node.start()
    os.kill(node.process.pid, signal.SIGSTOP)
    os.kill(serving.process.pid, signal.SIGCONT)
    node.until(lambda: "takes no region back" in serving.output())
    os.kill(node.process.pid, signal.SIGCONT)
    node.until(lambda: [held["in_use_by"] for held in node.status()["regions"]] == [1])
    assert serving.stop() == 0
    assert node.stop() == 0


@pytest.mark.parametrize("prewarm", ["torch=1", "torch=0"])
@pytest.mark.parametrize("victim", ["agent", "prefetcher"])
def test_the_fetch_dies_while_a_request_waits(
    start: Start, start_node: Start, slow_origin: SlowOrigin, prewarm: str, victim: str
) -> None:
    node = start_node("--prewarm", prewarm)
    if prewarm == "torch=1":
        node.wait_warm()
    before = node.children()
    serving = start("--model", slow_origin.url, "--node-socket", node.socket)
    node.until(lambda: "listening" in serving.output())
    node.until(lambda: [held["state"] for held in node.status()["regions"]] == ["fetching"])
    answers: list[Any] = []
    request = threading.Thread(target=lambda: answers.append(serving.complete()["choices"][0]["text"]))
    request.start()
    if victim == "agent":
        node.kill()
    else:
        node.until(lambda: "prefetcher" in node.children().values())  # it names itself after the fork
        (prefetcher,) = [pid for pid, name in node.children().items() if name == "prefetcher"]
        os.kill(prefetcher, signal.SIGKILL)
    slow_origin.bytes_per_s = 1e9
    request.join(90)
    assert answers, serving.output()
    assert answers[0]
    assert serving.complete()["choices"][0]["text"] == answers[0]
    node.until(lambda: FALLBACK in serving.output())
    assert serving.stop() == 0
    assert serving.output().count(FALLBACK) == 1
    if victim == "agent":
        node.until(lambda: not any(alive(pid) for pid in before))


def test_a_warm_process_dies_while_it_is_specialised(start: Start, node: Any, example: Path) -> None:
    before = taken(node)
    (engine,) = node.status()["engines"]["torch"]["pids"]
    serving = start("--model", example, "--node-socket", node.socket)
    node.until(lambda: taken(node) == before + 1)
    os.kill(engine, signal.SIGKILL)
    assert serving.complete()["choices"][0]["text"]
    assert "the node's engine process ended; starting one of our own (the agent's log" in serving.output()
    assert f"torch engine process {engine} ended (killed by SIGKILL)" in node.output()
    assert serving.stop() == 0


def test_an_engine_that_is_asked_for_by_the_first_request(start: Start, node: Any, example: Path) -> None:
    before = taken(node)
    serving = start("--model", example, "--node-socket", node.socket, "--engine-start", "request")
    serving.wait_ready()
    assert serving.request("GET", "/readyz")[1]["engine"] == "idle"
    assert taken(node) == before
    text = serving.complete()["choices"][0]["text"]
    assert taken(node) == before + 1
    assert serving.stop() == 0
    without = start("--model", example, "--node-socket", "none", "--engine-start", "request")
    without.wait_ready()
    assert set(without.children().values()) <= {"prefetcher", "function", "worker", "templates"}
    assert without.complete()["choices"][0]["text"] == text
    assert without.stop() == 0


def test_two_functions_of_one_model_share_its_bytes(start: Start, start_node: Start, slow_origin: SlowOrigin) -> None:
    slow_origin.bytes_per_s = 1e9
    node = start_node("--look-every-s", "0")
    client = node.client()
    client.region(slow_origin.url).close()
    node.until(lambda: [held["state"] for held in node.status()["regions"]] == ["done"])
    asked = slow_origin.asked
    functions = [start("--model", slow_origin.url, "--node-socket", node.socket) for _ in range(2)]
    texts = [serving.complete()["choices"][0]["text"] for serving in functions]
    assert texts[0] == texts[1]
    assert slow_origin.asked == asked, "nothing was fetched for them"
    inodes = {mapped_region(serving.child("engine")) for serving in functions}
    assert len(inodes) == 1, "both engines map one memfd"
    for serving in functions:
        assert serving.stop() == 0
    client.close()
    assert node.stop() == 0


def mapped_region(pid: int) -> str:
    """The inode of the region that this process maps."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:medusa-region" in line:
            return line.split()[4]
    pytest.fail(f"process {pid} maps no region")


@pytest.mark.forked(False)  # the handler imports torch
@pytest.mark.parametrize("url", ["folder", "http"])
def test_a_handlers_own_module_from_the_agents_region(
    start: Start, start_node: Start, tmp_path: Path, url: str
) -> None:
    import torch
    from safetensors.torch import save_file

    handler = Path(__file__).parents[1] / "functions" / "own_module" / "handler.py"
    scope: dict[str, Any] = {"__name__": "own_module"}
    exec(compile(handler.read_text(), str(handler), "exec"), scope)
    net = scope["Net"]().eval()
    save_file({f"net.{name}": tensor for name, tensor in net.state_dict().items()}, tmp_path / "model.safetensors")
    node = start_node()
    client = node.client()
    with serving_origin(tmp_path, bytes_per_s=1e9) as server:
        model = server.url if url == "http" else str(tmp_path)
        client.region(model).close()
        node.until(lambda: [held["state"] for held in node.status()["regions"]] == ["done"])
        arguments = ("--model", model, "--engine", "none", "--handler", handler)
        serving = start(*arguments, "--node-socket", node.socket)
        status, answer, _ = serving.request("POST", "/", {"value": 0.5})
        assert status == 200, answer
    with torch.inference_mode():
        expected = net(torch.full((1, 3, 8, 8), 0.5))[0]
    torch.testing.assert_close(torch.tensor(answer["logits"]), expected)
    assert "prefetcher" not in serving.children().values()
    assert FALLBACK not in serving.output()
    assert serving.stop() == 0


def test_an_engine_of_the_agent_dies_while_it_serves(start: Start, node: Any, example: Path) -> None:
    (engine,) = node.status()["engines"]["torch"]["pids"]
    serving = start("--model", example, "--node-socket", node.socket)
    text = serving.complete()["choices"][0]["text"]
    os.kill(engine, signal.SIGKILL)
    assert serving.complete()["choices"][0]["text"] == text
    assert serving.stop() == 0


def test_a_killed_function_takes_its_engine_along(start: Start, node: Any, example: Path) -> None:
    (engine,) = node.status()["engines"]["torch"]["pids"]
    serving = start("--model", example, "--node-socket", node.socket)
    assert serving.complete()["choices"][0]["text"]
    serving.process.kill()
    serving.process.wait()
    node.until(lambda: not alive(engine))
    node.until(lambda: node.status()["regions"][0]["in_use_by"] == 0)
