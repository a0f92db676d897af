"""The kernel's kill for want of memory, of the processes that a head consists of: it comes back, and says why."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from cluster_nodes import MODEL, ClusterNode, complete, until
from medusa_runtime.errors import MedusaError
from memory_group import MemoryGroup
from process_tree import alive

NAME = "tiny"
NAMED = "memory ran out, the limit is "
AGENT = "medusa_adapters\0node"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(900),  # Ray takes its time on a busy machine
]


class Limited:
    """A head whose processes share a memory limit."""

    def __init__(self, group: MemoryGroup, head: ClusterNode) -> None:
        self.group, self.head = group, head

    def pid(self, words: str) -> int:
        """The process of this name, or with these words in its command line."""
        return next((pid for pid, name in self.head.processes().items() if self._is(pid, name, words)), 0)

    def _is(self, pid: int, name: str, words: str) -> bool:
        if name.startswith(words[:15]):
            return True
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            return words in file.read()
        return False

    def kill(self, words: str) -> None:
        """Use up the memory until the kernel has killed it; returns when there is another."""
        victim, before = self.pid(words), self.head.output().count(NAMED)
        self.group.kill(victim)
        until(lambda: not alive(victim), self.head.output)
        until(lambda: self.pid(words) not in (0, victim), self.head.output)
        until(lambda: self.head.output().count(NAMED) > before, self.head.output)

    def answers(self) -> bool:
        """Whether an instance answers, in the state that the controller has."""
        try:
            instance = self.head.ready_instance(NAME)
            return bool(instance) and "choices" in complete(instance["url"], self.head.headers())
        except (MedusaError, OSError, KeyError):
            return False

    def remove(self) -> None:
        with contextlib.suppress(MedusaError):
            self.head.call("remove", name=NAME)
        until(lambda: not self.head.status_of("head").get("instances"), self.head.output)


@pytest.fixture(scope="module", params=[3000, 1000])
def limited(request: pytest.FixtureRequest) -> Iterator[Limited]:
    with MemoryGroup(request.param) as group:
        head = ClusterNode("head", 0, wrapper=group.inside, flags=["--prewarm", "torch=0"])
        try:
            yield Limited(group, head.wait_ready())
            assert head.end(signal.SIGTERM) == 0
            until(lambda: group.shared_bytes() == 0, lambda: f"{group.shared_bytes()} bytes of shared memory")
        finally:
            head.close()


@pytest.mark.parametrize("phase", ["idle", "deploy", "scale"])
@pytest.mark.parametrize("victim", ["ray::Controller", "ray::NodeActor", AGENT])
def test_what_is_killed_comes_back(limited: Limited, victim: str, phase: str) -> None:
    head = limited.head
    if phase == "deploy":
        killing = threading.Thread(target=limited.kill, args=(victim,))
        killing.start()
        with contextlib.suppress(MedusaError):  # no controller just now: the command says so
            head.call("deploy", name=NAME, url=str(MODEL), min=1, max=1)
        killing.join()
        until(lambda: _calls(head, "deploy", name=NAME, url=str(MODEL), min=1, max=1), head.output)
    else:
        head.call("deploy", name=NAME, url=str(MODEL), min=phase == "idle", max=1)
        if phase == "scale":
            head.call("scale", name=NAME, min=1, max=1)
        else:
            until(limited.answers, head.output)
        limited.kill(victim)
    until(limited.answers, head.output)
    descriptors = len(os.listdir(f"/proc/{head.process.pid}/fd"))
    limited.remove()
    until(lambda: len(os.listdir(f"/proc/{head.process.pid}/fd")) <= descriptors, head.output)


def _calls(head: ClusterNode, operation: str, **arguments: object) -> bool:
    try:
        head.call(operation, **arguments)
    except (MedusaError, OSError):
        return False
    return True
