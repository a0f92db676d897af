"""Ten minutes of functions that come, go, die and attack: the agent's descriptors and memory are as before.

MEDUSA_SOAK_S says for how long.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import MedusaError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.messages import send
from medusa_runtime.process import ReportPipe
from medusa_runtime.timeline import Timeline
from strangers import ALICE, MALLORY, as_user

SOAK_S = float(os.environ.get("MEDUSA_SOAK_S", "600"))
MODELS = 6
MB = 1 << 20

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(SOAK_S + 300)]


def footprint(node: Any) -> dict[str, int]:
    """Open files, resident memory of its own, and shared memory, of the agent."""
    pid = node.process.pid
    shared: dict[int, int] = {}
    open_files = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        open_files += 1
        with suppress(OSError):
            if "memfd:" in os.readlink(descriptor):
                found = descriptor.stat()
                shared[found.st_ino] = found.st_blocks * 512
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "files": open_files,
        "own_memory": int(fields["RssAnon"].split()[0]) << 10,
        "shared": sum(shared.values()),
        "children": len(node.children()),
    }


def a_reader(node: Any, url: str) -> None:
    with closing(NodeClient(node.socket)) as client, closing(client.region(url)) as region:
        for name in region.wait_index(30).order:
            region.wait_tensor(name, 30)


def a_quitter(node: Any, url: str) -> None:
    with closing(NodeClient(node.socket)) as client:
        send(client._socket, "region", {"url": url})


def an_attacker(node: Any, url: str) -> None:
    forged = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    for body in (b"nonsense", b'{"type":"region","url":"file://[x"}', b'{"type":"keep","url":"/\\ud800"}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(node.socket)
            connection.send(b'{"type":"hello","version":1}')
            socket.send_fds(connection, [body], [forged] * random.randrange(1, 12))
    with closing(NodeClient(node.socket)) as client:
        client.return_region(url, forged)


def an_engines_function(node: Any, url: str) -> None:
    timeline, reports, listener = Timeline.create("t"), ReportPipe(), socket.socket(socket.AF_UNIX)
    mine, theirs = socket.socketpair()
    with closing(NodeClient(node.socket)) as client:
        client.region(url).close()
        given = [listener.fileno(), timeline.fd, reports.write_fd, theirs.fileno()]
        client.engine("torch", {"model": url, "state": "none", "kv_cache_mb": 16}, given)
        time.sleep(random.random())
    mine.close()


def test_a_soak(start_node: Callable[..., Any], put_model: Callable[..., str], origin: Any) -> None:
    urls = [put_model(f"m{number}", 2 * MB) for number in range(MODELS)]
    arguments = ("--allow", origin.url, "--prewarm", "torch=1", "--memory-budget", "7MB", "--look-every-s", "5")
    node = start_node(*arguments, "--per-caller", "memory=6MB,fetches=3", "--log-level", "error")
    acts = (a_reader, a_reader, a_quitter, an_attacker, an_engines_function)
    rounds, samples = 0, []

    def quiet() -> dict[str, int]:
        for url in urls:
            with suppress(MedusaError), closing(NodeClient(node.socket)) as client:
                client.drop(url)
        node.wait_warm()
        node.until(lambda: node.status()["regions"] == [])
        node.until(lambda: set(node.children().values()) == {"torch-zygote", "engine"})
        node.until(lambda: len(node.children()) == 2)
        node.until(lambda: list(node.status()["callers"]) == ["user 0"])
        return footprint(node)

    for warm_up in (True, False):
        deadline = time.monotonic() + (min(20.0, SOAK_S / 4) if warm_up else SOAK_S)
        while time.monotonic() < deadline:
            act, user = random.choice(acts), random.choice((ALICE, MALLORY))
            as_user(user, lambda act=act: act(node, random.choice(urls)))  # type: ignore[misc]
            rounds += 1
            if rounds % 10 == 0:
                prefetchers = [pid for pid, name in node.children().items() if name == "prefetcher"]
                for pid in prefetchers[:1]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, random.choice((signal.SIGKILL, signal.SIGSTOP)))
            assert node.process.poll() is None, node.output()
        samples.append(quiet())
    before, after = samples
    print(f"{rounds} rounds in {SOAK_S:g} s: before {before}, after {after}")
    assert rounds > SOAK_S / 10, "each act, many times, however busy the machine is"
    assert after["files"] <= before["files"] + 2
    assert after["shared"] <= before["shared"] + MB, "the timeline grows, and nothing else"
    assert after["own_memory"] <= before["own_memory"] + 8 * MB
    assert node.stop() == 0
