"""Messages that no client of ours would send: none of them may end the agent or leave something in it.

FUZZ_INPUTS=100000 tries that many; without it some hundreds.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from medusa_runtime.errors import MedusaError, NodeError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.messages import receive
from medusa_runtime.node.regions.model_key import model_key
from process_tree import open_files

EXAMPLES = int(os.environ.get("FUZZ_INPUTS", "300"))
pytestmark = [pytest.mark.timeout(100 + EXAMPLES // 20), pytest.mark.forked]
fuzzed = settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)

_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_PARTS = st.sampled_from(
    ["", "/", "//", "..", ".", "%2e", "%", "[", "]", "@", ":", "::", "\\", "\0", "\ud800", "é", "m"]
)
_SCHEMES = st.sampled_from(
    ["", "file://", "local://", "reference://", "s3://", "http://127.0.0.1:1/", "zip://", "HF://"]
)
_URLS = st.builds(lambda scheme, parts: scheme + "".join(parts), _SCHEMES, st.lists(_PARTS, max_size=8))
_FIELDS = ("version", "url", "pin", "fresh", "background", "layers", "kind", "settings", "type")
_KINDS = st.sampled_from(
    ["hello", "region", "keep", "engine", "drop", "unpin", "status", "room", "sealed", "take", "fork"]
)
_BODIES = st.builds(
    lambda kind, url, body: {"url": url, **body, "type": kind},
    _KINDS | st.text(max_size=5),
    _URLS,
    st.dictionaries(st.sampled_from(_FIELDS), _ANYTHING, max_size=4),
)
_MESSAGES = st.tuples(
    st.binary(min_size=1, max_size=200) | _BODIES.map(lambda body: json.dumps(body).encode()),
    st.lists(st.sampled_from(["null", "memfd", "socket", "folder", "pipe"]), max_size=10),
)


@fuzzed
@given(_URLS | st.text(st.characters(), max_size=50))
@example("file://[x/y")
@example("/\ud800")
@example("local:///etc")
@example("file:///://")
@example("file:///a://b")
def test_a_url_is_one_name_or_an_error(url: str) -> None:
    try:
        key = model_key(url)
    except NodeError as error:
        str(error).encode()
        return
    assert model_key(key) == key, "a name is its own name"
    key.encode()


@pytest.fixture(scope="module")
def descriptors() -> Iterator[dict[str, int]]:
    reading, writing = os.pipe()
    one, other = socket.socketpair()
    found = {
        "null": os.open(os.devnull, os.O_RDWR),
        "memfd": os.memfd_create("fuzz", os.MFD_ALLOW_SEALING),
        "socket": one.detach(),
        "folder": os.open("/", os.O_RDONLY),
        "pipe": writing,
    }
    yield found
    for descriptor in (*found.values(), reading):
        os.close(descriptor)
    other.close()


def test_no_message_hurts_the_agent(start_node: Callable[..., Any], descriptors: dict[str, int]) -> None:
    node = start_node("--allow", "http://127.0.0.1:1", "--log-level", "error")
    connections: list[socket.socket] = []

    def connected() -> socket.socket:
        if not connections:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(60)
            connection.connect(node.socket)
            connection.send(b'{"type":"hello","version":1}')
            assert receive(connection) is not None
            connections.append(connection)
        return connections[0]

    before = len(open_files(node.process.pid))

    @fuzzed
    @given(_MESSAGES)
    @example((b'{"type":"region","url":"file://[x/y"}', []))
    @example((b'{"type":"region","url":"/\\ud800"}', []))
    @example((b'{"type":"keep","url":"http://127.0.0.1:1/m"}', ["memfd"]))
    @example((b'{"type":"region","url":"/"}', ["folder"]))
    @example((b'{"type":"\\ud800"}', []))
    @example((b'{"type":"hello","version":1' + b"0" * 5000 + b"}", []))
    @example((b"\xff\xfe{\0}\0", ["socket", "pipe"]))
    def attack(message: tuple[bytes, list[str]]) -> None:
        data, names = message
        connection = connected()
        try:
            socket.send_fds(connection, [data], [descriptors[name] for name in names])
            answer = receive(connection)
        except (OSError, MedusaError):
            answer = None
        if answer is not None:
            answer.close()
        # A connection that waits for a region may still be answered: the next message is on a fresh one.
        if answer is None or answer.kind in ("wait", "region"):
            connections.pop().close()

    attack()
    for connection in connections:
        connection.close()
    assert node.process.poll() is None, node.output()
    assert "could not be answered" not in node.output(), node.output()
    with_all_closed = NodeClient(node.socket)
    with_all_closed.close()
    node.until(lambda: node.status()["callers"].get(f"user {os.getuid()}", {}).get("connections") == 1)
    node.until(lambda: not node.children())
    node.until(lambda: len(open_files(node.process.pid)) <= before + 2 * len(node.status()["regions"]) * 3 + 3)
    assert node.stop() == 0
