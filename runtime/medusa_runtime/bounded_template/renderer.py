"""Chat templates, which come with a checkpoint, rendered in another process within limits.

Jinja's sandbox keeps a template from running code. It does not keep one from ``'a' * 10**10``, from loops that never
end, or from nesting that overflows the stack. The kernel does, in a process that can be lost: the rendering fails, and
the next one gets another process.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import cache
from typing import Any

from ..container_limits import OutOfMemory, signal_name
from ..errors import LimitError
from ..process import die_with_parent, hang_up
from ..process_limits import as_limit_error
from . import worker
from .worker import ANSWER, NO_ROOM, OUT_OF_MEMORY, REQUEST, TOO_LONG, serve

CPU_S = 3.0  # and more if the messages are long: some templates look at all earlier ones for each
_MOST_CPU_S = 30.0
_CPU_BYTES = 25_000  # of messages and tools for a second more
MEMORY_BYTES = 256 << 20
_MEMORY_FACTOR = 32  # parsed values take up to thirty times the memory of their text
MOST_CHARACTERS = 32 << 20  # of the answer, and four for each byte of the messages
_LOOK_S = 0.5
_WALL_FACTOR = 20  # a busy machine gives the process a twentieth of a CPU, or the rendering is given up
_TURN_S = 0.5  # a rendering that takes longer does not keep those of other threads waiting
_MOST_OTHERS = 3
_VARIABLES = ("LANG", "LC_", "LD_", "PYTHON", "TZ")  # the process gets no others, some of which are secrets
_ADVICE = "; send less, or put a chat_template.jinja that stays within the limits beside the weights"


class RenderingError(Exception):
    """A chat template refuses the messages or exceeds a limit. Its text continues a sentence about the template."""


class TooLongError(RenderingError):
    """The text of a chat template is longer than it may be."""


def _go_on() -> None: ...


class _Process:
    """A process that renders. With ``fork``, it shares the memory of this one, which must have a single thread."""

    def __init__(self, out_of_memory: OutOfMemory, fork: bool = False) -> None:
        self._out_of_memory = out_of_memory
        with ExitStack() as opened:
            self.connection, theirs = map(opened.enter_context, socket.socketpair(type=socket.SOCK_SEQPACKET))
            self._memory = opened.enter_context(open(os.memfd_create("medusa-template"), "r+b", buffering=0))
            self.connection.settimeout(_LOOK_S)
            self.pid = (_fork if fork else _spawn)(theirs.fileno(), self._memory.fileno())
            # Another process may get its number, once a handler has waited for all children, but not its descriptor.
            self._pidfd = _open_pidfd(self.pid)
            if self._pidfd is not None:
                opened.callback(os.close, self._pidfd)
            self.files = opened.pop_all()
        theirs.close()
        self._status: int | None = None

    def has_ended(self, options: int = os.WNOHANG) -> bool:
        if self._status is None:
            kind, number = (os.P_PID, self.pid) if self._pidfd is None else (os.P_PIDFD, self._pidfd)
            try:
                ended = os.waitid(kind, number, os.WEXITED | options)
            except ChildProcessError:  # a handler has waited for all children
                self._status = 0
            else:
                if ended is not None:
                    self._status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if self._status is not None:
                self.files.close()
        return self._status is not None

    def _signal(self, number: int) -> None:
        if self._pidfd is None:
            os.kill(self.pid, number)
        else:
            signal.pidfd_send_signal(self._pidfd, number)

    def render(self, source: bytes, values: bytes, check: Callable[[], None], most: int | None) -> str:
        cpu_s = min(CPU_S + len(values) / _CPU_BYTES, _MOST_CPU_S)
        memory_bytes = MEMORY_BYTES + _MEMORY_FACTOR * len(values)
        most = MOST_CHARACTERS + 4 * len(values) if most is None else most
        self._out_of_memory.look()
        try:
            self._write(source, values)
            self.connection.send(REQUEST.pack(len(source), len(values), cpu_s, memory_bytes, most))
            failed, size = ANSWER.unpack(self._receive(math.ceil(_WALL_FACTOR * cpu_s / _LOOK_S), check))
            text = os.pread(self._memory.fileno(), min(size, 4 * most), 0).decode("utf-8", "surrogatepass")
            os.truncate(self._memory.fileno(), 0)
        except BaseException as error:  # a later request must not get this one's answer
            self.close()
            if not isinstance(error, OSError | ValueError | struct.error) or as_limit_error(error):
                raise
            if self._status is not None and self._out_of_memory.has_killed(self._status):
                raise LimitError(f"a chat template could not be rendered: {self._out_of_memory.words()}") from error
            if self._status == TOO_LONG:
                text = f"makes a text of more than {most} characters from these messages{_ADVICE}"
                raise TooLongError(text) from error
            raise RenderingError(self._fault(error, cpu_s, memory_bytes)) from error
        if failed:
            raise RenderingError(text)
        return text

    def close(self) -> None:
        if self.has_ended():
            return
        try:
            self._signal(signal.SIGKILL)
        except OSError:  # the handler has changed its user: the process will find its connection closed
            self._status = 0
            self.files.close()
        else:
            self.has_ended(0)

    def _write(self, *parts: bytes) -> None:
        if os.pwritev(self._memory.fileno(), parts, 0) < sum(map(len, parts)):
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    def _receive(self, looks: int, check: Callable[[], None]) -> bytes:
        for _ in range(looks):
            with suppress(TimeoutError):
                return self.connection.recv(ANSWER.size)
            check()
            self._signal(signal.SIGCONT)  # somebody may have stopped it
        raise TimeoutError

    def _fault(self, error: Exception, cpu_s: float, memory_bytes: int) -> str:
        """Return why the process, which has ended, gave no answer."""
        if isinstance(error, TimeoutError):
            return f"was not rendered within {_WALL_FACTOR * cpu_s:.3g} s, on this busy machine; try again"
        if self._status == -signal.SIGPROF:
            return f"took more than {cpu_s:.3g} s of CPU time{_ADVICE}"
        if self._status == OUT_OF_MEMORY:
            return f"took more than {memory_bytes >> 20} MB of memory{_ADVICE}"
        if self._status == NO_ROOM:
            return "makes a text for which there is no room; raise ulimit -f"
        assert self._status is not None
        how = signal_name(-self._status) if self._status < 0 else f"exit status {self._status}"
        return f"ended the process that renders it ({how}){_ADVICE}"


class TemplateRenderer:
    """Renders chat templates, in one other process as a rule. Any thread may call it.

    Renderings that wait for a long one get a process for themselves, a few at a time.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._forget)

    def _reset(self) -> None:
        self._turn = threading.Lock()
        self._began_s = 0.0  # when the last one began that has had its turn
        self._others = threading.BoundedSemaphore(_MOST_OTHERS)
        self._out_of_memory = OutOfMemory()
        self._process: _Process | None = None

    def start(self, *, fork: bool = False) -> None:
        """Start the process ahead: with ``fork`` as a small one, but not from a process with several threads."""
        with self._turn, suppress(OSError):  # the first rendering says why
            self._start(fork)

    def render(
        self,
        source: str,
        values: Mapping[str, Any],
        *,
        check: Callable[[], None] = _go_on,
        most_characters: int | None = None,
    ) -> str:
        """Return the text of a template. By default, it may be somewhat longer than the values.

        ``check`` is called twice a second, and may raise to end the rendering. Raises RenderingError, and LimitError
        where no process can be started, or memory ran out.
        """
        try:
            data = json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise RenderingError(f"takes only what can be written as JSON: {error}") from error
        template = source.encode("utf-8", "surrogatepass")
        try:
            while not self._turn.acquire(timeout=_TURN_S):
                check()
                if time.monotonic() - self._began_s > _TURN_S and self._others.acquire(blocking=False):
                    try:
                        with closing(_Process(self._out_of_memory)) as other:
                            return other.render(template, data, check, most_characters)
                    finally:
                        self._others.release()
            try:
                self._began_s = time.monotonic()
                return self._start().render(template, data, check, most_characters)
            finally:
                self._turn.release()
        except OSError as error:
            raise as_limit_error(error) or error from error

    def _start(self, fork: bool = False) -> _Process:
        if self._process is None or self._process.has_ended():
            self._process = _Process(self._out_of_memory, fork)
        return self._process

    def close(self) -> None:
        """End the process, and what it renders. The next rendering starts another one."""
        if (process := self._process) is not None:
            hang_up(process.connection)  # the thread that waits for its answer ends it, and the turn
        with self._turn:
            if self._process is not None:
                self._process.close()

    def _forget(self) -> None:
        """Leave the process to the parent of this one, which has just been forked."""
        if self._process is not None:
            self._process.files.close()
        self._reset()


@cache
def template_renderer() -> TemplateRenderer:
    """Return the renderer of this process."""
    return TemplateRenderer()


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor of a child; None in a sandbox without pidfd_open(2)."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _fork(connection: int, memory: int) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        die_with_parent(parent)  # not in _spawn: the kernel means the thread, and others may end
        serve(connection, memory)
    finally:
        os._exit(0)


def _spawn(connection: int, memory: int) -> int:
    environment = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    command = [sys.executable, "-P", "-m", worker.__name__]
    files = [(os.POSIX_SPAWN_DUP2, connection, 0), (os.POSIX_SPAWN_DUP2, memory, 1)]
    return os.posix_spawn(sys.executable, command, environment, file_actions=files)


__all__ = ["CPU_S", "MEMORY_BYTES", "RenderingError", "TemplateRenderer", "TooLongError", "template_renderer"]
