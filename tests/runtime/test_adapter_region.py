"""An adapter's region in the function process."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.errors import LimitError, ObjectNotFoundError
from medusa_runtime.instance.adapter_region import AdapterRegion, open_adapter
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.messages import channel_pair, send
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline


class Lease(NodeClient):
    """A connection to an agent, of which the test has the other end."""

    def __init__(self, least_descriptor: int) -> None:
        ours, self.agents = channel_pair()
        self._socket = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, least_descriptor))
        self._loss = None
        ours.close()


def test_an_adapter_of_an_agent_can_be_looked_at_beside_a_thousand_clients() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        lease = Lease(1500)  # select(2) takes descriptors below 1024
        held = AdapterRegion(Region.create(), lease)
        assert not held.failed
        send(lease.agents, "lost", {"message": "the store has failed"})
        assert held.failed
        lease.agents.close()
        held.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_signature_in_an_adapters_url_is_not_shown_to_those_who_ask_for_it(origin: Any) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"expected adapter_model.safetensors or adapter_model.bin") as caught:
        open_adapter(f"{origin.url}/a?signature=secret", Settings(), Timeline.create("test"))
    assert "secret" not in str(caught.value)


def test_without_room_for_a_thread_an_adapter_leaves_nothing_open() -> None:
    timeline = Timeline.create("test")
    before, size = os.listdir("/proc/self/fd"), threading.stack_size(1 << 46)
    try:
        with pytest.raises(LimitError, match="no further process or thread could be made"):
            open_adapter("/nowhere", Settings(node_socket="none"), timeline)
    finally:
        threading.stack_size(size)
    assert os.listdir("/proc/self/fd") == before
