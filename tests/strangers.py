"""Callers of the agent that are other users: code that runs in a forked child with another user's rights."""

from __future__ import annotations

import encodings.idna  # noqa: F401  sockets want it for names of hosts, and another user may not read its file
import os
import sys
import traceback
from collections.abc import Callable, Sequence

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
