"""What an agent does to those who ask when it is killed or stopped, and what strangers can do to its files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.errors import LimitError, MedusaError, NodeError
from medusa_runtime.node.attachment import Attachment, Loss
from medusa_runtime.node.client import FEW_WAITS, NodeClient
from medusa_runtime.node.messages import send
from medusa_runtime.process import ReportPipe, wait_readable
from medusa_runtime.timeline import Timeline
from process_tree import alive, asleep, descendants, stopped

pytestmark = [pytest.mark.timeout(200), pytest.mark.forked]

Start = Callable[..., Any]
Put = Callable[..., str]
LONELY = 54321  # a user without processes
ALONE = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ten_who_wait_for_an_agent_that_is_killed_are_told(start_node: Start, put_model: Put, origin: Any) -> None:
    node = start_node()
    url = put_model("m", 8 << 20)
    hold = threading.Event()
    origin.accept = lambda *_: hold.wait(60)  # the store does not say what the checkpoint consists of
    clients = [node.client() for _ in range(10)]
    errors: list[MedusaError] = []

    def ask(client: NodeClient) -> None:
        try:
            client.region(url).close()
        except MedusaError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    node.until(lambda: [held["in_use_by"] for held in node.status()["regions"]] == [10])
    children = node.children()
    node.kill()
    for thread in threads:
        thread.join(60)
    hold.set()
    assert [str(error)[:24] for error in errors] == ["the node agent went away"] * 10
    node.until(lambda: not any(alive(pid) for pid in children))
    for client in clients:
        client.close()


def test_ten_who_have_half_of_a_model_go_on_to_the_next_agent(start_node: Start, put_model: Put, origin: Any) -> None:
    node = start_node()
    url = put_model("m", 8 << 20)
    origin.bytes_per_s = 1e6
    clients = [node.client() for _ in range(10)]
    regions = [client.region(url) for client in clients]
    assert {region.progress().state for region in regions} == {"fetching"}
    node.kill()
    assert [client.read_loss() for client in clients] == [""] * 10
    origin.bytes_per_s = None
    node.start()
    with pytest.raises(NodeError, match=r"is not complete|none that the node agent made"):  # it grew after the record
        node.client().return_region(url, regions[0].fd)
    for client, region in zip(clients, regions, strict=True):
        with closing(node.client()) as again:
            complete = again.region(url)
            for name in complete.wait_index(60).order:
                complete.wait_tensor(name, 60)
            complete.close()
        region.close()
        client.close()
    node.until(lambda: [held["in_use_by"] for held in node.status()["regions"]] == [0])


def test_a_start_does_not_wait_for_an_agent_that_hangs(start_node: Start, put_model: Put) -> None:
    node = start_node()
    os.kill(node.process.pid, signal.SIGSTOP)
    timeline = Timeline.create("test")
    assert Attachment.attach(Settings(model=put_model("m"), node_socket=node.socket), timeline) is None
    assert stopped(node.process.pid)
    (fallback,) = [stage for stage in timeline.stages() if stage.name == "node-fallback"]
    assert re.search(r"did not answer 'hello' within 0\.\d+ s", fallback.detail["reason"])
    timeline.close()
    os.kill(node.process.pid, signal.SIGCONT)
    assert node.status()["regions"] == [], "it goes on, and the one who gave up left nothing"
    assert node.stop() == 0


def test_an_agent_that_stops_while_its_store_is_slow_is_noticed(start_node: Start, put_model: Put, origin: Any) -> None:
    node = start_node()
    url = put_model("m")
    hold = threading.Event()
    origin.accept = lambda *_: hold.wait(60)  # the store does not say what the checkpoint consists of
    errors: list[NodeError] = []

    def ask() -> None:
        with closing(NodeClient(node.socket, waits=FEW_WAITS)) as client:
            try:
                client.region(url, timeout_s=1e6)
            except NodeError as error:
                errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    node.until(lambda: [held["in_use_by"] for held in node.status()["regions"]] == [1])
    os.kill(node.process.pid, signal.SIGSTOP)
    thread.join(60)
    assert "did not answer 'hello'" in str(errors[0])
    assert stopped(node.process.pid)
    hold.set()
    os.kill(node.process.pid, signal.SIGCONT)
    node.until(lambda: [held["in_use_by"] for held in node.status()["regions"]] == [0])


def test_a_slow_store_is_waited_for_while_the_agent_lives(start_node: Start, put_model: Put, origin: Any) -> None:
    node = start_node()
    url = put_model("m")
    hold = threading.Event()
    origin.accept = lambda *_: hold.wait(60)
    client = NodeClient(node.socket, waits=1000)
    hellos: list[str] = []
    request = client._request

    def count(kind: str, *rest: Any) -> Any:
        hellos.append(kind)
        if hellos.count("hello") == 3:
            hold.set()
        return request(kind, *rest)

    client._request = count  # type: ignore[method-assign, assignment]
    region = client.region(url)
    assert region.wait_index(60).order
    assert client.status()["regions"], "no answer to an earlier question is taken for this one's"
    region.close()
    client.close()


def test_a_prefetcher_that_dies_before_its_question_is_answered(start_node: Start, put_model: Put, origin: Any) -> None:
    node = start_node()
    url = put_model("m")
    hold = threading.Event()
    origin.accept = lambda *_: hold.wait(60)
    errors: list[MedusaError] = []

    def ask(client: NodeClient) -> None:
        try:
            client.region(url)
        except MedusaError as error:
            errors.append(error)

    thread = threading.Thread(target=ask, args=(node.client(),))
    thread.start()
    node.until(lambda: "prefetcher" in node.children().values())
    (prefetcher,) = node.children()
    os.kill(node.process.pid, signal.SIGSTOP)
    hold.set()
    looks: list[bool] = []
    # It waits for its answer.
    node.until(lambda: looks.append(asleep(prefetcher)) or (all(looks[-20:]) and len(looks) >= 20))
    os.kill(prefetcher, signal.SIGKILL)
    node.until(lambda: not alive(prefetcher))
    os.kill(node.process.pid, signal.SIGCONT)
    thread.join(60)
    assert "its prefetcher ended early" in str(errors[0])
    again = node.client().region(url)
    assert again.wait_index(60).order, "the agent lives, and fetches it for the next"
    again.close()


def test_a_prefetcher_ends_in_the_moment_in_which_it_is_replaced(
    start_node: Start, put_model: Put, origin: Any
) -> None:
    """Both are news of one look; the new prefetcher's connection has the number of the old one's."""
    node = start_node()
    url = put_model("m", 8 << 20)
    origin.bytes_per_s = 2e5  # so that the fetch goes on meanwhile, also on a busy machine
    first, second = node.client(), node.client()
    first.region(url).close()
    (prefetcher,) = node.children()
    os.kill(node.process.pid, signal.SIGSTOP)
    send(second._socket, "region", {"url": url, "fresh": True})
    os.kill(prefetcher, signal.SIGKILL)
    node.until(lambda: not alive(prefetcher))
    os.kill(node.process.pid, signal.SIGCONT)
    second._read_answer("region").close()
    assert "given this fetch up" in str(first.read_loss())
    (held,) = node.status()["regions"]
    assert held["in_use_by"] == 1


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs root and setpriv for another user")
def test_an_agent_that_can_start_no_process_says_so(start_node: Start, put_model: Put) -> None:
    user = ["setpriv", f"--reuid={LONELY}", f"--regid={LONELY}", "--clear-groups"]
    node = start_node("--prewarm", "torch=1", wrapper=[*user, sys.executable, "-c", ALONE])
    node.until(lambda: "no further process" in node.output())
    url = put_model("m")
    for _ in range(2):
        with closing(NodeClient(node.socket, LONELY)) as client:
            with pytest.raises(LimitError, match="no further process"):
                client.region(url)
            assert client.status()["count"] == 0


def test_more_functions_than_files_may_be_open_by_default(start_node: Start) -> None:
    node = start_node(wrapper=["prlimit", "--nofile=64:4096"])
    clients = [node.client() for _ in range(100)]
    assert clients[-1].status()["pid"] == node.process.pid


def test_a_link_in_the_place_of_the_agents_list_is_not_followed(start_node: Start, put_model: Put) -> None:
    node = start_node()
    precious = Path(node.folder) / "precious"
    precious.write_text("precious")
    Path(node.socket + ".regions.new").symlink_to(precious)
    client = node.client()
    client.region(put_model("m")).close()
    node.until(lambda: Path(node.socket + ".regions").exists())
    assert precious.read_text() == "precious"
    assert not Path(node.socket + ".regions").is_symlink()


def test_a_function_that_learns_of_a_lost_model_while_it_takes_an_engine_starts_on_its_own(
    start_node: Start, put_model: Put, origin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = put_model("m", 8 << 20)
    origin.bytes_per_s = 1e6
    node = start_node("--prewarm", "torch=1")
    timeline, reports = Timeline.create("test"), ReportPipe()
    attachment = Attachment.attach(Settings(model=url, node_socket=node.socket), timeline)
    assert attachment is not None
    assert attachment.region is not None
    (prefetcher,) = (pid for pid, name in descendants(node.process.pid).items() if name == "prefetcher")
    os.kill(prefetcher, signal.SIGKILL)
    node.until(lambda: wait_readable(attachment.descriptors[0], 0))
    with socket.socket() as listener:
        assert not attachment.take_engine(listener, timeline, reports)
    assert attachment.take_losses(set()) == [Loss.REGION]
    assert "its prefetcher ended early" in caplog.text
    attachment.region.close()
    attachment.close()
    reports.close()
    timeline.close()


def test_a_look_at_a_store_has_as_little_memory_as_a_fetch(start_node: Start, put_model: Put, origin: Any) -> None:
    """The store may be a stranger's, which sends more at each look."""
    node = start_node("--look-every-s", "0.2")
    with closing(node.client()) as client:
        client.region(put_model("m")).close()
        node.until(lambda: node.status()["fetches"]["done"] == 1)
        hold = threading.Event()
        origin.accept = lambda *_: hold.wait(60)

        def limits() -> tuple[str, str]:
            found = (pid for pid, name in node.children().items() if name == "revalidate")
            process = next((Path(f"/proc/{pid}") for pid in found), Path("/proc/self"))
            lines = (process / "limits").read_text().splitlines()
            data = next(line.split()[3] for line in lines if line.startswith("Max data size"))
            return data, (process / "oom_score_adj").read_text().strip()

        node.until(lambda: limits()[0] != "unlimited" and limits()[1] == "900")
        assert int(limits()[0]) < 2 << 30
        hold.set()
