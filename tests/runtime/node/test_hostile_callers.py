"""Attacks on the agent by another user of the machine, one for each promise of docs/node.md. All of them must fail."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import NodeRefusedError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.messages import receive, send
from medusa_runtime.region.layout import State, Word
from medusa_runtime.region.reader import Region
from medusa_runtime.region.seals import F_ADD_SEALS, SEAL_FUTURE_WRITE, SEAL_GROW, SEAL_SHRINK, SEAL_WRITE
from strangers import ALICE, MALLORY, as_user, as_user_raw, ask, contents, raw

pytestmark = [pytest.mark.root, pytest.mark.timeout(200), pytest.mark.forked]

Start = Callable[..., Any]
Put = Callable[..., str]
SECRET = b'{"secret of root": 1}'


@pytest.fixture
def folder(tmp_path: Path, safetensors_file: Callable[..., bytes]) -> Path:
    """A checkpoint of Mallory's in a place that everybody can reach."""
    for above in (tmp_path, *tmp_path.parents):
        if above == tmp_path or above.name.startswith(("pytest-", "popen-")):
            above.chmod(0o755)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.safetensors").write_bytes(safetensors_file({"w": ("U8", [64], b"\1" * 64)}))
    (mine / "config.json").write_text('{"model_type": "m"}')
    for path in (mine, *mine.iterdir()):
        os.chown(path, MALLORY, MALLORY)
    return mine


# Cache poisoning (keep)


def forged(seals: int, weights: bytes = b"poison") -> int:
    """A memfd that says of itself that it is a complete region."""
    region = Region.create()
    os.ftruncate(region.fd, 1 << 20)
    os.pwrite(region.fd, struct.pack("<Q", State.DONE), Word.STATE * 8)
    os.pwrite(region.fd, weights, 8192)
    if seals:
        fcntl.fcntl(region.fd, F_ADD_SEALS, seals)
    return region.fd


@pytest.mark.parametrize("seals", [0, SEAL_WRITE, SEAL_WRITE | SEAL_SHRINK | SEAL_GROW])
def test_a_region_of_somebody_elses_making_is_not_kept(start_node: Start, put_model: Put, seals: int) -> None:
    url = put_model("m")
    node = start_node("--allow", url)

    def attack() -> str:
        with closing(NodeClient(node.socket)) as client:
            client.return_region(url, forged(seals))
        return "kept"

    assert "is none that the node agent made" in as_user(MALLORY, attack)
    assert as_user(ALICE, lambda: ask(node.socket, url)) == '{"model_type": "m"}', "the store's, and nobody else's"
    assert node.status()["refused"] == {"Node.Refused": 1}
    assert node.stop() == 0


def test_a_region_that_the_agent_made_comes_back_only_as_it_was(start_node: Start, put_model: Put) -> None:
    url = put_model("m")
    node = start_node("--allow", url)
    client = node.client()
    region = client.region(url)
    contents(region)
    node.until(lambda: node.status()["regions"][0]["state"] == "done")
    listed = json.loads(Path(node.socket + ".regions").read_text())
    assert list(listed["regions"]) == [url]
    node.kill()
    node.start()
    os.fchmod(os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY), 0o600)  # its time of change is now another one
    with pytest.raises(NodeRefusedError, match="none that the node agent made"):
        node.client().return_region(url, region.fd)
    region.close()


def test_a_done_region_of_no_bytes_does_not_hang_the_agent(start_node: Start, put_model: Put) -> None:
    url = put_model("m")
    node = start_node("--allow", url)
    as_user(MALLORY, lambda: raw(node.socket, ("keep", {"url": url}, [forged(0)])))
    assert node.reachable()
    assert node.stop() == 0, "and SIGTERM is heard"


# What one reader can do to the others


def test_a_reader_seals_nothing_for_the_others(start_node: Start, put_model: Put) -> None:
    url = put_model("m")
    node = start_node("--allow", url)

    def attack() -> str:
        with closing(NodeClient(node.socket)) as client, closing(client.region(url)) as region:
            fcntl.fcntl(region.demand_fd, F_ADD_SEALS, SEAL_FUTURE_WRITE)
        return "sealed"

    assert as_user(MALLORY, attack).startswith("PermissionError")
    assert as_user(ALICE, lambda: ask(node.socket, url)) == '{"model_type": "m"}'


def test_a_reader_that_owns_the_region_as_root_of_a_container_locks_nobody_out(
    start_node: Start, put_model: Put
) -> None:
    url = put_model("m")
    node = start_node("--allow", url)
    region = node.client().region(url)
    os.fchmod(region.fd, 0)
    assert as_user(ALICE, lambda: ask(node.socket, url)) == '{"model_type": "m"}'
    region.close()


# Files that the asker may not read


def test_links_to_files_of_root_are_not_followed(start_node: Start, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    for name in ("vocab.json", "tokenizer.json"):
        (folder / name).symlink_to(secret)
    with suppress(OSError):
        os.link(secret, folder / "merges.txt")
    node = start_node()
    assert as_user(MALLORY, lambda: ask(node.socket, str(folder))) == '{"model_type": "m"}'
    for name in ("vocab.json", "tokenizer.json", "merges.txt"):
        assert as_user(MALLORY, lambda name=name: ask(node.socket, str(folder), name)) == "nothing"
    assert as_user(MALLORY, lambda: NodeClient(node.socket).region(str(tmp_path))).startswith("ObjectNotFoundError")
    assert node.stop() == 0


def test_weights_of_root_are_not_indexed(
    start_node: Start, folder: Path, tmp_path: Path, safetensors_file: Callable[..., bytes]
) -> None:
    secret = tmp_path / "theirs.safetensors"
    secret.write_bytes(safetensors_file({"w": ("U8", [64], b"\7" * 64)}))
    secret.chmod(0o600)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(secret)
    node = start_node()
    said = as_user(MALLORY, lambda: ask(node.socket, str(folder)))
    assert "may not be read by user 1001" in said or "Forbidden" in said, said


def test_nobody_is_given_what_was_read_as_another(start_node: Start, folder: Path) -> None:
    """Root has the folder's files in the agent's memory; Mallory may open the folder, and not the file."""
    (folder / "config.json").write_bytes(SECRET)
    os.chown(folder / "config.json", 0, 0)
    (folder / "config.json").chmod(0o600)
    node = start_node("--pin", str(folder))
    node.until(lambda: [held["state"] for held in node.status()["regions"]] == ["done"])
    assert ask(node.socket, str(folder)) == SECRET.decode()
    assert as_user(MALLORY, lambda: ask(node.socket, str(folder))) == "nothing"
    assert as_user(ALICE, lambda: ask(node.socket, str(folder))) == "nothing"
    assert len(node.status()["regions"]) == 3, "one for each of them"


def test_nobody_learns_what_others_have_of_folders_that_they_cannot_read(start_node: Start, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    node = start_node()
    node.client().region(str(secret)).close()
    found = [
        as_user_raw(node.socket, ("region", {"url": url, "held": True}, [])) for url in (f"{secret}", f"{secret}2")
    ]
    assert found[0][0] == found[1][0].replace("secret2", "secret")


def test_the_askers_groups_count(start_node: Start, folder: Path) -> None:
    os.chown(folder / "config.json", 0, 4321)
    (folder / "config.json").chmod(0o640)
    node = start_node()
    assert as_user(ALICE, lambda: ask(node.socket, str(folder))) == "nothing"
    assert as_user(ALICE, lambda: ask(node.socket, str(folder)), groups=(4321,)) == '{"model_type": "m"}'


def test_a_folder_that_is_exchanged_all_the_time(start_node: Start, folder: Path, tmp_path: Path) -> None:
    """Between the folder's opening and the reading of its files the path names one with a file of root's."""
    secret = tmp_path / "other"
    shutil.copytree(folder, secret)
    (secret / "config.json").write_bytes(SECRET)
    (secret / "config.json").chmod(0o600)
    os.chown(tmp_path, MALLORY, MALLORY)
    node = start_node()

    def attack() -> set[str]:
        swapper = os.fork()
        if not swapper:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and os.getppid() != 1:
                with suppress(OSError):
                    os.rename(folder, tmp_path / "aside")
                    os.rename(secret, folder)
                    os.rename(folder, secret)
                    os.rename(tmp_path / "aside", folder)
            os._exit(0)
        found = set()
        try:
            for _ in range(20):
                try:
                    found.add(ask(node.socket, str(folder)))
                except Exception as error:  # noqa: BLE001
                    found.add(type(error).__name__)
        finally:
            os.kill(swapper, 9)
            os.waitpid(swapper, 0)
        return found

    said = as_user(MALLORY, attack)
    assert "secret" not in said
    assert node.reachable()


def test_a_fifo_or_a_device_among_the_files_holds_nobody_up(start_node: Start, folder: Path) -> None:
    os.mkfifo(folder / "vocab.json", 0o666)
    (folder / "merges.txt").symlink_to("/dev/zero")
    node = start_node()
    assert as_user(MALLORY, lambda: ask(node.socket, str(folder))) == '{"model_type": "m"}'
    assert as_user(MALLORY, lambda: ask(node.socket, str(folder), "merges.txt")) == "nothing"


@pytest.mark.parametrize(
    "url", ["local:///proc/self/environ", "reference://m::file:///tmp/x.json", "simplecache::file:///etc", "dir://x"]
)
def test_no_scheme_reads_the_agents_files(start_node: Start, url: str) -> None:
    node = start_node()
    (answer,) = as_user_raw(node.socket, ("region", {"url": url}, []))
    assert "expected an absolute path or one of" in answer


# One message must not be the end


@pytest.mark.parametrize(
    "url", ["file://[x/y", "/\ud800", "http://[", "/\0", "/a\n\x1b[2J", "//", "s3://" + "x" * 60000]
)
def test_no_url_ends_the_agent(start_node: Start, url: str) -> None:
    node = start_node()

    def attack() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(30)
            connection.connect(node.socket)
            for body in ({"type": "hello", "version": 1}, {"type": "region", "url": url}, {"type": "keep", "url": url}):
                connection.send(json.dumps(body).encode())
                if receive(connection) is None:
                    break
        return "done"

    as_user(MALLORY, attack)
    assert node.reachable()
    assert "could not be answered" not in node.output(), "no error of the agent's own"
    assert node.stop() == 0


def test_a_socket_that_lingers_holds_nobody_up(start_node: Start) -> None:
    """Closing a TCP socket with unsent bytes waits for SO_LINGER seconds."""
    node = start_node()

    def attack() -> str:
        with socket.create_server(("127.0.0.1", 0)) as server:
            tcp = socket.create_connection(server.getsockname())
            there, _ = server.accept()
            tcp.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    tcp.send(b"x" * 65536)
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(node.socket)
            for count in (1, 30):
                send(connection, "hello", {"version": 1}, [tcp.fileno()] * count)
            os.close(tcp.detach())
            began = time.monotonic()
            NodeClient(node.socket).close()
            there.close()
            return f"{time.monotonic() - began:.1f}"

    assert float(as_user(MALLORY, attack)) < 5


# Limits


def test_without_allow_nobody_has_the_agents_credentials(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m")
    node = start_node()
    said = as_user(MALLORY, lambda: ask(node.socket, url))
    assert (
        f"without --allow it fetches for its own user alone; to open it, start it with --allow PREFIX={MALLORY}" in said
    )
    assert not origin.requests
    assert ask(node.socket, url) == '{"model_type": "m"}'
    assert "NodeRefusedError" in as_user(MALLORY, lambda: ask(node.socket, url)), "also when it is there"


def test_only_the_agents_user_pins_drops_refreshes_and_sees_all(start_node: Start, put_model: Put) -> None:
    url = put_model("m")
    node = start_node("--allow", url)
    node.client().region(url).close()
    for body in ({"url": url, "pin": True}, {"url": url, "fresh": True}):
        assert "expected the agent's own user" in as_user_raw(node.socket, ("region", body, []))[0]
    assert "expected the agent's own user" in as_user_raw(node.socket, ("drop", {"url": url}, []))[0]
    status = as_user(MALLORY, lambda: json.dumps(NodeClient(node.socket).status()))
    found = json.loads(status)
    assert (found["regions"], found["count"], found["used_bytes"]) == ([], 0, 0)
    assert "callers" not in found


IN_ANOTHER_CONTAINER = """
import json, sys
from medusa_runtime.node.client import NodeClient
client = NodeClient(sys.argv[1])
said = []
for ask in (lambda: client.drop(sys.argv[2]), lambda: client.region(sys.argv[2], pin=True),
            lambda: client.region(sys.argv[2])):
    try:
        ask()
        said.append("done")
    except Exception as error:
        said.append(str(error))
print(json.dumps([*said, client.status()["regions"]]))
"""


def may_unshare() -> bool:
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode
    )


@pytest.mark.skipif(not may_unshare(), reason="needs unshare for a PID namespace")
def test_root_of_another_container_is_nobody_special(start_node: Start, put_model: Put) -> None:
    url = put_model("m")
    node = start_node("--pin", url)
    node.until(lambda: [held["state"] for held in node.status()["regions"]] == ["done"])
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", IN_ANOTHER_CONTAINER]
    done = subprocess.run([*command, node.socket, url], capture_output=True, text=True, timeout=240, check=False)
    dropped, pinned, had, regions = json.loads(done.stdout or done.stderr)
    assert "expected the agent's own user" in dropped
    assert "may not be had by user 0 of another container" in pinned
    assert "may not be had by user 0 of another container" in had
    assert regions == []


@pytest.mark.skipif(not may_unshare(), reason="needs unshare for a PID namespace")
def test_root_of_another_container_reads_what_it_sees_without_the_agents_rights(
    start_node: Start, folder: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    os.chown(secret, ALICE, ALICE)
    (folder / "vocab.json").symlink_to(secret)
    (folder / "added_tokens.json").symlink_to("config.json")
    node = start_node()
    script = (
        "import sys; from medusa_runtime.node.client import NodeClient as C\n"
        "r = C(sys.argv[1]).region(sys.argv[2]); print(r.file('vocab.json'), r.file('added_tokens.json'))"
    )
    command = ["unshare", "--pid", "--mount", "--fork", sys.executable, "-c", script, node.socket, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == 'None b\'{"model_type": "m"}\'\n', done.stderr


def test_a_tenant_has_its_own_socket(start_node: Start, put_model: Put, origin: Any) -> None:
    ours, theirs = put_model("a/m"), put_model("b/m")
    with_folder: list[str] = []
    node = start_node()
    assert node.stop() == 0
    for name in ("a", "b"):
        (node.folder / name).mkdir(mode=0o700)
        with_folder += ["--socket", f"{node.folder}/{name}/node.sock={origin.url}/{name}/"]
    os.chown(node.folder / "a", ALICE, ALICE)
    os.chown(node.folder / "b", MALLORY, MALLORY)
    node.arguments = tuple(with_folder)
    node.start()
    own = f"{node.folder}/b/node.sock"
    assert as_user(MALLORY, lambda: ask(own, theirs)) == '{"model_type": "b/m"}'
    assert "is not served on" in as_user(MALLORY, lambda: ask(own, ours))
    assert "Permission denied" in as_user(MALLORY, lambda: ask(f"{node.folder}/a/node.sock", ours))
    assert as_user(ALICE, lambda: ask(f"{node.folder}/a/node.sock", ours)) == '{"model_type": "a/m"}'
    with closing(NodeClient(own)) as root, pytest.raises(NodeRefusedError, match="expected the agent's own user"):
        root.drop(theirs)
    callers = node.status()["callers"]
    assert node.stop() == 0
    assert not Path(own).exists()
    assert callers.keys() <= {"user 0", own, f"{node.folder}/a/node.sock"}
