"""What one user may take of the agent: fetches, models, memory and connections have limits of each caller's own."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import NodeError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.messages import receive, send
from strangers import ALICE, MALLORY, as_user, as_user_raw, ask, contents

pytestmark = [pytest.mark.root, pytest.mark.timeout(200), pytest.mark.forked]

Start = Callable[..., Any]
Put = Callable[..., str]


def test_fetches_are_limited(start_node: Start, put_model: Put, origin: Any) -> None:
    over = threading.Event()
    origin.accept = lambda *_: over.wait(30)  # a tarpit
    node = start_node("--allow", origin.url, "--per-caller", "fetches=3")

    def attack() -> list[str]:
        clients, found = [], []
        for number in range(12):
            clients.append(NodeClient(node.socket))
            send(clients[-1]._socket, "region", {"url": f"{origin.url}/m{number}"})
            answer = receive(clients[-1]._socket)
            assert answer is not None
            found.append(answer.kind if answer.kind == "wait" else str(answer.body["message"])[:60])
        return found

    said = as_user(MALLORY, attack)
    assert said.count("'wait'") == 3
    assert said.count("user 1001 has 3 fetches of the node agent's already") == 9
    node.until(lambda: not node.status()["callers"]["user 1001"].get("connections"))
    assert node.status()["callers"]["user 1001"]["fetches"] == 3, "nobody waits for them, but they go on"
    # They give way to the next; another user was never in want.
    origin.accept = lambda *_: True
    first, second = put_model("m"), put_model("other")
    assert as_user(ALICE, lambda: ask(node.socket, first)) == '{"model_type": "m"}'
    assert as_user(MALLORY, lambda: ask(node.socket, second)) == '{"model_type": "other"}'
    over.set()
    assert node.stop() == 0


def test_one_connection_has_one_model(start_node: Start, put_model: Put, origin: Any) -> None:
    first, second = put_model("a"), put_model("b")
    node = start_node("--allow", origin.url)
    bodies = [("region", {"url": url}, []) for url in (first, second)]
    answers = as_user_raw(node.socket, *bodies)
    assert any("expected one model for a connection" in answer for answer in answers), answers


def test_connections_are_limited(start_node: Start) -> None:
    node = start_node("--per-caller", "connections=5")

    def attack() -> int:
        clients = []
        with suppress(NodeError):
            for _ in range(50):
                clients.append(NodeClient(node.socket))
        return len(clients)

    assert as_user(MALLORY, attack) == "5"
    assert as_user(ALICE, attack) == "5", "each has its own"
    assert node.status()["refused_callers"] == {"user 1000": 1, "user 1001": 1}


def test_small_files_are_memory(start_node: Start, put_model: Put, origin: Any) -> None:
    """Of weights without bytes a region still has what lies beside them."""
    for name in ("a", "b", "c"):
        put_model(name, 8)
        origin.put(f"/{name}/tokenizer.json", b" " * (4 << 20))
    node = start_node("--allow", origin.url, "--memory-budget", "100MB", "--per-caller", "memory=10MB")

    def attack() -> str:
        clients = [NodeClient(node.socket) for _ in range(3)]
        for client, name in zip(clients, "abc", strict=True):
            contents(client.region(f"{origin.url}/{name}"))
        return "had all"

    assert "takes 4 MB of memory; expected at most what user 1001 may have, 10 MB" in as_user(MALLORY, attack)
    assert node.status()["used_bytes"] > 8e6
    assert as_user(ALICE, lambda: ask(node.socket, f"{origin.url}/c")) == '{"model_type": "c"}'


def test_models_that_were_fetched_before_are_memory_of_the_one_that_takes_them(
    start_node: Start, put_model: Put, origin: Any
) -> None:
    urls = [put_model(name, 4 << 20) for name in ("a", "b", "c")]
    node = start_node("--allow", origin.url, "--memory-budget", "100MB", "--per-caller", "memory=10MB")
    for url in urls:
        node.client().region(url).close()  # of the agent's own user, which pays for nothing
    for client in node.clients:
        client.close()

    def attack() -> str:
        clients = [NodeClient(node.socket) for _ in range(3)]
        for client, url in zip(clients, urls, strict=True):
            contents(client.region(url))
        return "had all"

    said = as_user(MALLORY, attack)
    assert "takes 4 MB of memory; expected at most what user 1001 may have, 10 MB, of which 8 MB are in use" in said
    with closing(node.client()) as client:
        client.region(urls[2])
        assert as_user(MALLORY, lambda: ask(node.socket, urls[2])) == '{"model_type": "c"}', "another one pays for it"


def test_refusals_are_logged_once_a_second_for_all_connections_of_a_caller(start_node: Start) -> None:
    node = start_node()

    def attack() -> float:
        began = time.monotonic()
        for _ in range(100):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(node.socket)
                connection.send(b"no message")
                connection.recv(1)
        return time.monotonic() - began

    seconds = float(as_user(MALLORY, attack))
    assert 1 <= node.output().count("refused to user 1001") <= 1 + seconds
    assert node.status()["refused_callers"] == {"user 1001": 100}


def test_models_are_limited(start_node: Start, put_model: Put, origin: Any) -> None:
    urls = [put_model(name, 8) for name in ("a", "b", "c")]
    node = start_node("--allow", origin.url, "--per-caller", "models=2")

    def attack() -> str:
        clients = [NodeClient(node.socket) for _ in urls]
        for client, url in zip(clients, urls, strict=True):
            contents(client.region(url))
        return "had all"

    assert "user 1001 uses 2 models of the node agent's already; expected at most 2" in as_user(MALLORY, attack)


def test_models_that_are_brought_back_are_limited_too(start_node: Start, put_model: Put, origin: Any) -> None:
    urls = [put_model(name, 8) for name in ("a", "b")]
    node = start_node("--allow", origin.url, "--per-caller", "models=1")
    regions = [node.client().region(url) for url in urls]
    for region in regions:
        contents(region)
    recorded = Path(node.socket + ".regions")
    node.until(lambda: [held["state"] for held in node.status()["regions"]] == ["done", "done"])
    node.until(lambda: recorded.exists() and len(json.loads(recorded.read_text())["regions"]) == 2)
    time.sleep(0.2)  # the time of its seal is recorded a moment after it
    node.kill()
    node.start()
    ours = [node.client() for _ in urls]
    for client, url, region in zip(ours, urls, regions, strict=True):
        client.return_region(url, region.fd)

    def attack() -> str:
        clients = [NodeClient(node.socket) for _ in urls]
        for client, url, region in zip(clients, urls, regions, strict=True):
            client.return_region(url, region.fd)
        return "had all"

    assert "user 1001 uses 1 models of the node agent's already; expected at most 1" in as_user(MALLORY, attack)
    for region in regions:
        region.close()


# Who may have what
