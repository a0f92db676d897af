"""The node actor: whatever the controller asks of a node can be asked through Ray, and one that hangs is killed."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import medusa_cluster.controller
import pytest
from medusa_cluster.node.processes.ping_watchdog import PingWatchdog
from medusa_cluster.node.ray.actor import NodeActor
from medusa_cluster.node.ray.processes import CONTROL_SOCKET_VARIABLE
from process_tree import Unloaded

# As in Ray, each concurrency group has a loop and a thread of its own. At SIGUSR1 one of them waits for ever.
ACTOR = """
import asyncio, signal, sys, threading
from medusa_cluster.node.ray.actor import NodeActor

loops = {}
for name in ("default", "control"):
    loops[name] = asyncio.new_event_loop()
    threading.Thread(target=loops[name].run_forever, daemon=True).start()
actor = NodeActor.__new__(NodeActor)
asyncio.run_coroutine_threadsafe(actor.__init__(), loops["default"]).result()
asyncio.run_coroutine_threadsafe(actor.ping(), loops["control"]).result()
lock = threading.Lock()
lock.acquire()
signal.signal(signal.SIGUSR1, lambda *_: loops[sys.argv[1]].call_soon_threadsafe(lock.acquire))
print("works", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("group", ["default", "control"])
def test_an_actor_of_which_one_loop_hangs_is_killed_within_three_seconds(tmp_path: Path, group: str) -> None:
    environment = os.environ | {CONTROL_SOCKET_VARIABLE: str(tmp_path / "control.sock")}
    command = [sys.executable, "-c", ACTOR, group]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as actor:
        assert actor.stdout
        assert actor.stdout.readline() == "works\n"

        async def hang() -> float:
            watch = PingWatchdog("the node actor", tmp_path / "actor.sock", 1.5, "ray::NodeActor")
            watching = asyncio.create_task(watch.run())
            await asyncio.sleep(4)
            assert actor.poll() is None
            actor.send_signal(signal.SIGUSR1)
            clock = Unloaded(os.getpid())
            while actor.poll() is None and clock.passed_s() < 30:
                await asyncio.sleep(0.02)
            noticed_s = clock.passed_s()
            watching.cancel()
            return noticed_s

        try:
            assert asyncio.run(hang()) <= 3
        finally:
            actor.kill()
        assert actor.wait() == -signal.SIGKILL


def test_the_actor_has_every_operation_that_the_controller_sends() -> None:
    folder = Path(str(medusa_cluster.controller.__file__)).parent
    sent = {name for path in folder.glob("*.py") for name in re.findall(r'"op": "(\w+)"', path.read_text())}
    assert {"describe", "fetch", "group_port", "start"} <= sent
    assert [name for name in sorted(sent) if not hasattr(NodeActor, name)] == []
    assert "group" in inspect.signature(NodeActor.start).parameters
    assert "layers" in inspect.signature(NodeActor.fetch).parameters
