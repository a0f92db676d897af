"""The agent's own life: its socket, its restart, and clients that mean it no good."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import NodeError, NodeRefusedError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.messages import LARGEST_BYTES, receive, send
from medusa_runtime.region.reader import Region
from process_tree import alive

Start = Callable[..., Any]
Put = Callable[..., str]


def read_all(region: Region) -> int:
    index = region.wait_index(30)
    for name in index.order:
        region.wait_tensor(name, 30)
    return len(index.order)


def test_a_second_agent_on_a_socket_says_who_has_it(start_node: Start) -> None:
    node = start_node()
    command = [sys.executable, "-m", "medusa_adapters.cli.main", "node", "--socket", node.socket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert f"another node agent (process {node.process.pid}) serves {node.socket}" in done.stderr
    assert node.reachable()


def test_the_socket_of_a_killed_agent_is_taken_over(start_node: Start) -> None:
    node = start_node()
    node.kill()
    assert os.path.exists(node.socket)
    with pytest.raises(NodeError, match="cannot be reached: Connection refused"):
        node.client()
    node.start()
    assert node.reachable()
    assert node.stop() == 0


def test_who_waits_for_an_agent_learns_that_it_has_ended(start_node: Start) -> None:
    node = start_node()

    def never() -> bool:
        node.process.send_signal(signal.SIGKILL)
        return False

    with pytest.raises(pytest.fail.Exception, match=r"the agent has ended with -9:\n(.*\n)*.*node agent on"):
        node.until(never)


def test_a_file_that_is_no_socket_stays(start_node: Start) -> None:
    node = start_node()
    assert node.stop() == 0
    Path(node.socket).write_text("precious")
    node.start(wait=False)
    assert node.process.wait(60) == 2
    assert "is not a socket" in node.output()
    assert Path(node.socket).read_text() == "precious"
    with pytest.raises(NodeError, match="is no socket"):
        node.client()


# Whoever may write to the socket's folder, such as a tenant, exchanges the socket for a link if there is time for it.
_EXCHANGED = """
import os, sys
from medusa_runtime.node.socket_file import SocketFile

def exchange(event, _):
    if event == "os.chmod":
        os.unlink(sys.argv[1])
        os.symlink(sys.argv[2], sys.argv[1])

sys.addaudithook(exchange)
os.umask(0o077)
SocketFile(sys.argv[1])
"""


def test_the_mode_of_the_socket_is_given_to_no_other_file(tmp_path: Path) -> None:
    path, secret = tmp_path / "node.sock", tmp_path / "secret"
    secret.touch(0o600)
    subprocess.run([sys.executable, "-c", _EXCHANGED, path, secret], check=True)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.lstat().st_mode) == 0o666  # every user may connect


def test_no_agent_where_one_is_expected(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"there is no node agent at .* start one with: medusa node"):
        NodeClient(str(tmp_path / "node.sock"))


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs root and setpriv to start an agent as another user")
def test_a_strangers_agent_is_refused(start_node: Start) -> None:
    node = start_node()
    os.chown(node.socket, 1000, 1000)
    with pytest.raises(NodeRefusedError, match="belongs to user 1000; expected 0"):
        node.client()
    # The file's owner is the agent's word; the kernel's counts, too.
    node.stop()
    path = str(node.folder / "other.sock")
    os.chmod(node.folder, 0o777)
    command = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", sys.executable, "-m"]
    other = subprocess.Popen(
        [*command, "medusa_adapters.cli.main", "node", "--socket", path], stdout=subprocess.DEVNULL
    )
    try:
        node.until(lambda: os.path.exists(path))
        os.chown(path, 0, 0)
        with pytest.raises(NodeRefusedError, match="belongs to user 1000"):
            NodeClient(path)
        NodeClient(path, trusted_user=1000).close()
    finally:
        other.terminate()
        other.wait()


def test_what_is_no_message_ends_its_connection_alone(start_node: Start, put_model: Put) -> None:
    node = start_node()
    good = node.client()
    for sent in (b"not json", b"[1]", b"{}", b"\x80", b"[" * 60000, b"x" * (LARGEST_BYTES + 1)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bad:
            bad.settimeout(60)
            bad.connect(node.socket)
            bad.send(sent)
            assert receive(bad) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bad:
        bad.settimeout(60)
        bad.connect(node.socket)
        devnull = os.open(os.devnull, os.O_RDONLY)
        socket.send_fds(bad, [b'{"type":"hello"}'], [devnull] * 30)
        assert receive(bad) is None
        os.close(devnull)
    assert read_all(good.region(put_model("m"))) == 8
    open_files = len(os.listdir(f"/proc/{node.process.pid}/fd"))
    assert open_files < 25, "descriptors that were sent are closed"
    good.close()


def test_bad_requests_are_answered(start_node: Start, put_model: Put) -> None:
    node = start_node()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(60)
        raw.connect(node.socket)

        def ask(kind: str, /, **body: object) -> str:
            send(raw, kind, body)
            answer = receive(raw)
            assert answer is not None
            return str(answer.body.get("message", answer.kind))

        assert "expected hello first" in ask("status")
        assert "speaks version 99 of the node agent's protocol, the agent 1" in ask("hello", version=99)
        assert ask("hello", version=1) == "hello"
        assert "url: expected text, found None" in ask("region")
        assert "url: expected text, found 7" in ask("region", url=7)
        assert "knows no message 'dance'" in ask("dance")
        assert "expected a region first" in ask("engine", kind="torch", settings={})
        assert "expected one descriptor" in ask("keep", url=put_model("m"))
        assert "holds no such model" in ask("drop", url="s3://b/nothing")
        assert "expected an absolute path" in ask("region", url="models/x")


def is_recorded(node: Any, region: Region) -> bool:
    return str(os.fstat(region.fd).st_ctime_ns) in Path(f"{node.socket}.regions").read_text()


def test_a_region_outlives_its_agent_and_comes_back_to_the_next(start_node: Start, put_model: Put, origin: Any) -> None:
    node = start_node("--look-every-s", "0")
    url = put_model("m")
    first = node.client()
    region = first.region(url)
    assert read_all(region) == 8
    node.until(lambda: node.status()["regions"][0]["state"] == "done")
    node.until(lambda: is_recorded(node, region))  # the agent does so a moment later
    node.kill()
    assert read_all(region) == 8, "what a function has, it keeps"
    node.start()
    assert node.status()["regions"] == []
    fetched = len(origin.requests)
    second = node.client()
    second.return_region(url, region.fd)
    (held,) = node.status()["regions"]
    assert (held["state"], held["in_use_by"]) == ("done", 1)
    third = node.client()
    assert read_all(third.region(url)) == 8
    assert len(origin.requests) == fetched, "nothing was fetched again"
    for client in (first, second, third):
        client.close()
    region.close()


def test_nobody_can_bring_a_region_of_his_own(start_node: Start, put_model: Put) -> None:
    node = start_node()
    url, other = put_model("m"), put_model("other")
    client = node.client()
    region = client.region(url)
    read_all(region)
    node.until(lambda: node.status()["regions"][0]["state"] == "done")
    node.kill()
    node.start()
    forged = Region.create()
    writer = forged.writer()
    writer.seal_early()
    writer.close()
    for offered, name in ((forged.fd, url), (region.fd, other), (os.open(os.devnull, os.O_RDONLY), url)):
        with pytest.raises(NodeRefusedError, match="is none that the node agent made"):
            node.client().return_region(name, offered)
    assert node.status()["regions"] == []
    forged.close()
    region.close()


def test_who_has_half_of_a_model_is_told_when_it_is_replaced(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m", 8 << 20)
    origin.bytes_per_s = 1e6
    node = start_node()
    first, second = node.client(), node.client()
    first.region(url).close()
    second.region(url, fresh=True).close()
    node.until(lambda: select.select([first], [], [], 0)[0])
    assert "given this fetch up" in str(first.read_loss())
    (held,) = node.status()["regions"]
    assert held["in_use_by"] == 1


def test_sigterm_leaves_nothing(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m", 8 << 20)
    origin.bytes_per_s = 1e6
    node = start_node()
    client = node.client()
    client.region(url)
    assert len(node.children()) == 1, "a prefetcher"
    assert node.stop() == 0
    client.close()


def test_a_killed_prefetcher_is_told_to_those_who_wait(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m", 8 << 20)
    origin.bytes_per_s = 1e6
    node = start_node()
    client = node.client()
    region = client.region(url)
    (prefetcher,) = node.children()
    os.kill(prefetcher, signal.SIGKILL)
    node.until(lambda: client.read_loss() is not None)
    assert region.progress().state == "fetching"
    origin.bytes_per_s = None
    other = node.client()
    assert read_all(other.region(url)) == 8, "the next one has it fetched anew"
    for one in (client, other):
        one.close()
    region.close()


def test_a_killed_agent_takes_its_prefetcher_along(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m", 8 << 20)
    origin.bytes_per_s = 1e6
    node = start_node()
    client = node.client()
    region = client.region(url)
    (prefetcher,) = node.children()
    node.kill()
    node.until(lambda: not alive(prefetcher))
    assert client.read_loss() == ""
    client.close()
    region.close()
