"""Callers of the agent that are other users: code that runs in a forked child with another user's rights."""

from __future__ import annotations

import encodings.idna  # noqa: F401  sockets want it for names of hosts, and another user may not read its file
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.messages import receive, send
from medusa_runtime.region.reader import Region

ALICE, MALLORY = 1000, 1001


def as_user(uid: int, body: Callable[[], object], *, groups: Sequence[int] = ()) -> str:
    """What ``body`` returns as text, or the error that it raises, when this user runs it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reading)
            os.setgroups(groups)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                said = str(body())
            except Exception as error:  # noqa: BLE001
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode(errors="replace")[:60000])
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the child failed"
    return said


def contents(region: Region, name: str = "config.json") -> str:
    index = region.wait_index(30)
    for tensor in index.order:
        region.wait_tensor(tensor, 30)
    return (region.file(name) or b"nothing").decode()


def ask(path: str, url: str, name: str = "config.json") -> str:
    with closing(NodeClient(path)) as client, closing(client.region(url)) as region:
        return contents(region, name)


def raw(path: str, *messages: tuple[str, dict[str, Any], list[int]]) -> list[Any]:
    """Return the answers to these messages after a hello, over a connection of its own."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(path)
        answers = []
        for kind, body, descriptors in (("hello", {"version": 1}, []), *messages):
            send(connection, kind, body, descriptors)
            answers.append(receive(connection))
        return answers[1:]


def as_user_raw(path: str, *messages: tuple[str, dict[str, Any], list[int]]) -> list[str]:
    said = as_user(MALLORY, lambda: json.dumps([str(answer and answer.body) for answer in raw(path, *messages)]))
    return list(json.loads(said))
