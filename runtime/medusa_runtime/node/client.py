"""A function's side of the agent's socket. It imports nothing heavy, because a start waits for it."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from typing import Any

from ..errors import NodeAwayError, NodeError, NodeRefusedError, from_code
from ..process import hang_up, wait_readable
from ..region.reader import Region
from .callers.peer import Peer
from .messages import VERSION, Message, close_without_linger, receive, send
from .regions.model_key import absolute, model_key, open_folder

# The agent itself never waits for anything, so its answers are quick. Limits count waits instead of time: if other
# processes have the cores, so that this one is woken late, the agent is late for the same reason.
_WAIT_MS = 10
_MANY_WAITS = 1000  # waits
FEW_WAITS = 20  # waits; with 24 busy loops on two cores, 1 of 200 answers took longer
_BEAT_MS = 100  # how often to check that the agent lives, while its store is slow
_SEALED_WITHIN_S = 60.0  # the time limit for a store to send a checkpoint's index


class NodeClient:
    """A connection to this node's agent. It is also the lease on a region: the agent keeps that while it is open."""

    def __init__(self, path: str, trusted_user: int | None = None, *, waits: int = _MANY_WAITS) -> None:
        """Connect. Raises NodeAwayError if there is no agent, and NodeRefusedError if it belongs to another user.

        The agent decides what the weights are, so it must belong to root, this user, or ``trusted_user``. ``waits`` is
        how many times to wait 10 ms for an answer before NodeAwayError is raised. FEW_WAITS is for callers that can do
        without the agent.
        """
        self._waits = waits
        self._loss: str | None = None  # why, if the agent has said so while an answer was waited for
        trusted = {0, os.getuid()} | (set() if trusted_user is None else {trusted_user})
        _check_file(path, trusted)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        limit_s = waits * _WAIT_MS / 1000
        try:
            # A blocking connect waits while more callers connect at once than the agent has room for, and is served in
            # turn. With a timeout of Python's, it would fail at once.
            limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket.connect(path)
            self._socket.settimeout(limit_s)  # for sending
            _check_owner(path, Peer.of(self._socket).uid, trusted)
            self._request("hello", {"version": VERSION})
        except BlockingIOError:
            self._socket.close()
            raise NodeAwayError(
                f"the node agent at {path} took no connection within {limit_s:g} s; it hangs, is stopped, or too many "
                "callers connect at once"
            ) from None
        except OSError as error:
            self._socket.close()
            raise NodeAwayError(f"the node agent at {path} cannot be reached: {error.strerror or error}") from None
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def region(
        self,
        url: str,
        *,
        pin: bool = False,
        fresh: bool = False,
        background: bool = False,
        existing_only: bool = False,
        layers: str | None = None,
        timeout_s: float = _SEALED_WITHIN_S,
    ) -> Region:
        """Return the region of a checkpoint as soon as it can be read. Raises the agent's error, or NodeError.

        ``timeout_s`` is how long the store may take to send the checkpoint's index.
        With ``pin``, the model is never evicted. With ``fresh``, it is fetched even if it is there. Only the agent's
        own user, or root, may use these two.
        With ``background``, the fetch gives way to others, because no function waits for it.
        ``layers`` (START:STOP) come first if the fetch begins now, for a worker of a group.
        With ``existing_only``, no fetch begins: NodeError is raised if the agent neither holds nor fetches the model.
        """
        key = model_key(absolute(url))
        folder_fd = open_folder(key)
        try:
            request: dict[str, Any] = {
                "url": key,
                "pin": pin,
                "fresh": fresh,
                "background": background,
                "held": existing_only,
            }
            request |= {} if layers is None else {"layers": layers}
            answer = self._request("region", request, () if folder_fd is None else (folder_fd,))
        finally:
            close_without_linger(() if folder_fd is None else (folder_fd,))
        deadline = time.monotonic() + timeout_s
        while answer.kind in ("wait", "hello"):
            if time.monotonic() > deadline:
                raise NodeError(f"the store did not send the checkpoint's index within {timeout_s:g} s")
            self._wait_readable(1, _BEAT_MS)
            answer = self._request("hello", {"version": VERSION})
            if answer.kind != "hello":
                try:
                    self._read_answer("hello")  # the region came before the answer to our hello
                except BaseException:
                    answer.close()
                    raise
        if answer.kind != "region" or len(answer.descriptors) != 2:
            answer.close()
            raise NodeError(f"the node agent answered {answer.kind!r}; expected a region")
        return Region(answer.descriptors[0], demand_fd=answer.descriptors[1], from_agent=True)

    def engine(self, kind: str, settings: dict[str, Any], descriptors: Sequence[int], gpus: str | None = None) -> int:
        """Let an idle engine process serve this function, and return its pid. Raises NodeError if none is idle.

        ``gpus``: the process gets this CUDA_VISIBLE_DEVICES; None: the agent's.
        """
        body = {"kind": kind, "settings": settings} | ({} if gpus is None else {"gpus": gpus})
        try:
            return int(self._request("engine", body, descriptors).body["pid"])
        except NodeError:
            if self._loss is not None:
                raise NodeError(self._loss) from None
            raise

    def return_region(self, url: str, region_fd: int) -> None:
        """Bring an agent a region that an earlier agent made. Raises NodeError if it does not accept it."""
        self._request("keep", {"url": model_key(absolute(url))}, (region_fd,))

    def drop(self, url: str) -> None:
        """Unpin a model and evict it. Raises NodeError while it is in use."""
        self._request("drop", {"url": model_key(absolute(url))})

    def unpin(self, url: str) -> None:
        """Unpin a model, so that it can be evicted when another one needs the room."""
        self._request("unpin", {"url": model_key(absolute(url))})

    def status(self) -> dict[str, Any]:
        return self._request("status").body

    def has_loss(self) -> bool:
        """Return whether ``read_loss`` has something to read, or to return."""
        return self._loss is not None or wait_readable(self._socket, 0)

    def read_loss(self) -> str | None:
        """Read a message, and return why the region will not be completed; "" if the agent has gone, or None.

        Call it when there is something to read.
        """
        if self._loss is not None:
            return self._loss
        try:
            message = receive(self._socket)
        except (OSError, NodeError):
            return ""
        if message is None:
            return ""
        message.close()
        return str(message.body.get("message")) if message.kind == "lost" else None

    def _request(self, kind: str, body: dict[str, Any] | None = None, descriptors: Sequence[int] = ()) -> Message:
        try:
            send(self._socket, kind, body, descriptors)
        except OSError as error:
            raise NodeAwayError(f"the node agent went away ({error.strerror})") from None
        answer = self._read_answer(kind)
        while answer.kind == "hello" and kind != "hello":  # a late answer to an earlier hello
            answer = self._read_answer(kind)
        return answer

    def _read_answer(self, kind: str) -> Message:
        if not self._wait_readable(self._waits, _WAIT_MS):
            seconds = self._waits * _WAIT_MS / 1000
            raise NodeAwayError(f"the node agent did not answer {kind!r} within {seconds:g} s; it hangs, or is stopped")
        answer = receive(self._socket)
        if answer is None:
            raise NodeAwayError("the node agent went away")
        if answer.kind == "lost":  # it is no answer, but comes by itself
            self._loss = str(answer.body.get("message"))
            return self._read_answer(kind)
        if answer.kind == "error":
            answer.close()
            raise from_code(str(answer.body.get("code")), str(answer.body.get("message")))
        return answer

    def _wait_readable(self, waits: int, wait_ms: int) -> bool:
        return any(wait_readable(self._socket, wait_ms / 1000) for _ in range(waits))

    def close(self) -> None:
        """End the connection, even if forked children hold it, too."""
        hang_up(self._socket)
        self._socket.close()


def _check_file(path: str, trusted: set[int]) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        reason = f"there is no node agent at {path}: {error.strerror}; start one with: medusa node"
        raise NodeAwayError(reason) from None
    if not stat.S_ISSOCK(status.st_mode):
        raise NodeError(f"{path} is no socket; expected a node agent's, see medusa node --socket")
    _check_owner(path, status.st_uid, trusted)


def _check_owner(path: str, owner: int, trusted: set[int]) -> None:
    if owner not in trusted:
        expected = " or ".join(str(user) for user in sorted(trusted))
        raise NodeRefusedError(
            f"{path} belongs to user {owner}; expected {expected}, because the agent decides what the weights "
            f"are (--node-user allows another)"
        )


__all__ = ["FEW_WAITS", "NodeClient"]
