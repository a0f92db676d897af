"""Child processes of a node server. None of them outlives it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from medusa_runtime.container_limits import OutOfMemory
from medusa_runtime.process import die_with_parent, kill_children

logger = logging.getLogger(__name__)

_KEPT_LINES = 20
_LONGEST_LOG_BYTES = 16 << 20
_POLL_S = 0.02  # between two checks whether killed processes have ended
_ORPHANS_S = 5.0  # for which they are killed again and again
OUT_OF_MEMORY = OutOfMemory()  # the out-of-memory kills in this process's control group


class Child:
    """A child process in a session of its own, so that Ctrl-C in a terminal reaches only the node server.

    Its output goes into the file ``log``, and line by line to ``on_line``. The kernel kills it when the node server
    dies. Make it in the event loop's thread: the kernel would kill it when the thread that started it ends.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._on_line = on_line
        OUT_OF_MEMORY.look()
        self._log = open(log, "ab", buffering=0)  # noqa: SIM115  closed when the process has ended
        try:
            self._process = _start(arguments, environment)
        except BaseException:
            self._log.close()
            raise
        self.pid = self._process.pid
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._read = asyncio.Event()  # all of its output
        try:
            self._watch_end()
            self._watch_output()
        except BaseException:  # such as no descriptor; nobody would know of the process
            os.killpg(self.pid, signal.SIGKILL)
            with self._log, self._process:  # waits for the end, and closes the pipe
                raise

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal, or None while the process runs."""
        return self._ended.result() if self._ended.done() else None

    @property
    def how(self) -> str:
        """How the process ended, in words."""
        return "it runs" if self.status is None else OUT_OF_MEMORY.how(self.status)

    @property
    def last_words(self) -> str:
        """Its last error in the form of ``medusa``'s commands or, without one, its last line."""
        lines = [message_of(line) for line in self.last_lines if line.strip()]
        errors = [line for line in lines if line.startswith("medusa: ")]
        return (errors or lines or ["it said nothing"])[-1]

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def read_rest(self, within_s: float) -> None:
        """Read the output to its end. Other processes may write it for longer than this one runs."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._read.wait()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.status is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self, grace_s: float) -> int:
        """Send SIGTERM, and after ``grace_s`` SIGKILL to its process group. Return the exit status."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    def kill(self) -> None:
        if self.status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _watch_end(self) -> None:
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self.pid)

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._ended.set_result(self._process.wait())

        loop.add_reader(descriptor, ended)

    def _watch_output(self) -> None:
        loop = asyncio.get_running_loop()
        output: IO[bytes] | None = self._process.stdout
        assert output is not None
        os.set_blocking(output.fileno(), False)
        unfinished = b""

        def readable() -> None:
            nonlocal unfinished
            try:
                data = os.read(output.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                loop.remove_reader(output.fileno())
                output.close()
                self._log.close()
                if unfinished:
                    self._take_line(unfinished)
                self._read.set()
                return
            self._write(data)
            *lines, unfinished = (unfinished + data).split(b"\n")
            unfinished = unfinished[-4096:]
            for line in lines:
                self._take_line(line)

        loop.add_reader(output.fileno(), readable)

    def _take_line(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self.last_lines.append(text)
        if self._on_line is not None:
            self._on_line(text)

    def _write(self, data: bytes) -> None:
        """Write output to the log, which is emptied when it is too long. Ignores errors such as a full disk."""
        with suppress(OSError):
            if self._log.tell() > _LONGEST_LOG_BYTES:
                self._log.truncate(0)
            self._log.write(data)


def message_of(line: str) -> str:
    """Return what a line of a log says: the line, or the message of an object in JSON, as a command prints it."""
    if not line.startswith("{"):
        return line
    try:
        found = json.loads(line)
        return f"medusa: {found['message']} [{found['code']}]" if "code" in found else str(found["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return line


def _start(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    return subprocess.Popen(
        arguments,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent),
    )


class RestartingChild:
    """A child that is started again whenever it ends, after a pause that doubles as long as it ends soon."""

    _SHORTEST_S, _LONGEST_S, _STABLE_S = 0.2, 10.0, 30.0

    def __init__(self, start: Callable[[], Child], on_end: Callable[[Child], Awaitable[None]] | None = None) -> None:
        """Keep the child that ``start`` makes. ``on_end`` is awaited after each end, before the next start."""
        self._start = start
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self.child: Child | None = None
        self.starts = 0

    def begin(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        loop, pause_s = asyncio.get_running_loop(), self._SHORTEST_S
        while True:
            began = loop.time()
            try:
                self.child = self._start()
            except OSError as error:  # out of processes or descriptors at this moment
                logger.warning("a process of this node cannot be started: %s; trying again", error)
            else:
                self.starts += 1
                await self.child.wait()
                if self._on_end is not None:
                    await self._on_end(self.child)
            pause_s = self._SHORTEST_S if loop.time() - began > self._STABLE_S else min(pause_s * 2, self._LONGEST_S)
            await asyncio.sleep(pause_s)

    async def end(self, grace_s: float) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.child is not None:
            await self.child.end(grace_s)


async def end_orphans(ours: set[int]) -> None:
    """Kill this process's children, and the orphans that they leave to it, until only ``ours`` remain."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _ORPHANS_S
    while kill_children(but=ours) and loop.time() < deadline:
        await asyncio.sleep(_POLL_S)
