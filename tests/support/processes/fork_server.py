"""Processes of tests that are forked from one in which everything they import is there already.

A script of ours imports for half a second before it does anything. What a test says about imports, or about what a
process needs, it says of a process that is started plainly.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from medusa_runtime.process import die_with_parent

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[3]
MESSAGE_BYTES = 1 << 20
MEDUSA_MAIN = "medusa_adapters.cli.main:main"
# What `medusa serve` and `medusa node` import until a request is answered, torch as well.
OF_FUNCTIONS = (
    "medusa_adapters.cli.command_line",
    "medusa_adapters.cli.serve",
    "medusa_runtime.instance",
    "medusa_handler.server.lean_gunicorn:import_leanly",  # as a function's process does
    "medusa_handler.server.gunicorn_worker",
    "medusa_handler.http.lean_flask:import_leanly",  # as it does, too
    "medusa_handler.openai.routes",
    "medusa_runtime.imports.lazy_torch:import_torch",
    "medusa_runtime.engine.torch.engine",
    "medusa_runtime.node.agent",
)
# What serves regions, and what a gateway consists of.
OF_CLUSTERS = (
    "medusa_adapters.cli.command_line",
    "medusa_cluster.gateway.process",
    "medusa_cluster.gateway.server",
    "benchmarks.cluster.peer_node",
    "medusa_runtime.node.agent",
)


class ForkServer:
    """Imports these modules, calls a ``module:function``, and forks; tests' modules are named by their path in tests.

    ``folders`` have further modules, as for a script the folder that it is in. The server ends with the test's process,
    and what it has forked ends with it.
    """

    def __init__(self, *modules: str, folders: Sequence[Path] = ()) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        command = [sys.executable, __file__, str(number), *modules]
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", *folders)))
        environ = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        ours = os.getpid()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environ,
            pass_fds=[number],
            process_group=0,
            preexec_fn=lambda: die_with_parent(ours),
        )
        theirs.close()

    def start(
        self,
        function: str,
        arguments: Sequence[str],
        *,
        folder: Path | None = None,
        environ: Mapping[str, str] | None = None,
        log: IO[bytes],
        output: IO[bytes] | None = None,
        pipes: bool = False,
    ) -> ForkedProcess:
        """Call ``module:function`` with these command line arguments in a process and a process group of its own.

        It writes to ``log``, and its stdout to ``output``; with ``pipes`` stdin and stdout are ours.
        """
        request = {"function": function, "arguments": arguments, "folder": str(folder or Path.cwd())}
        request["environ"] = dict(os.environ if environ is None else environ)
        ended, their_ended = os.pipe()
        if pipes:
            (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
            theirs = [their_stdin, their_stdout, log.fileno(), their_ended]
        else:
            theirs = [os.open(os.devnull, os.O_RDONLY), os.dup((output or log).fileno()), log.fileno(), their_ended]
        socket.send_fds(self._requests, [json.dumps(request).encode()], theirs)
        for number in (*theirs[:2], their_ended):
            os.close(number)
        return ForkedProcess(ended, *((stdin, stdout) if pipes else ()))

    def run(
        self,
        function: str,
        arguments: Sequence[str],
        *,
        folder: Path | None = None,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 240.0,
    ) -> subprocess.CompletedProcess[str]:
        """The same to its end, like ``subprocess.run`` with what it printed."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
            process = self.start(function, arguments, folder=folder, environ=environ, log=log, output=output)
            try:
                status = process.wait(timeout_s)
            finally:
                process.kill()
            output.seek(0)
            log.seek(0)
            printed, said = output.read().decode(), log.read().decode()
        return subprocess.CompletedProcess([function, *arguments], status, printed, said)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._requests.close()
        self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self.close()


_shared: dict[tuple[str, ...], ForkServer] = {}


def share(*modules: str) -> None:
    """Start the server that ``server_of`` gives to all workers which are forked from this process later."""
    _shared[modules] = ForkServer(*modules)


def shared_pids() -> set[int]:
    return {server.pid for server in _shared.values()}


def end_shared() -> None:
    """End the shared servers, also if a process that a test has left behind could still ask them."""
    for server in _shared.values():
        server.kill()
    _shared.clear()


@contextlib.contextmanager
def server_of(*modules: str) -> Iterator[ForkServer]:
    """The shared server that has imported ``modules``, or a new one."""
    shared = _shared.get(modules)
    server = shared or ForkServer(*modules)
    yield server
    if shared is None:
        server.close()


def asked_for(request: pytest.FixtureRequest) -> ForkServer | None:
    """The server for a test or file that is marked ``forked``; ``forked(False)`` excepts a test of a marked file."""
    marker = request.node.get_closest_marker("forked")
    server: ForkServer | None = None
    if marker is not None and marker.args != (False,):
        server = request.getfixturevalue("fork_server")
    return server


class ForkedProcess:
    """What tests use of ``subprocess.Popen``; ``pid`` is not a child of this process."""

    def __init__(self, ended: int, *pipes: int) -> None:
        self.stdin = open(pipes[0], "wb", 0) if pipes else None  # noqa: SIM115 (closed by who asked for it)
        self.stdout = open(pipes[1], "rb") if pipes else None  # noqa: SIM115
        self.returncode: int | None = None
        self._ended = open(ended, "rb", 0)  # noqa: SIM115 (closed when it has ended)
        self.pid = int(self._ended.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = int(self._ended.readline())
            self._ended.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> None:
    number, *modules = sys.argv[1:]
    for name in modules:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(number)))
    if request is not None:
        module, _, function = request["function"].partition(":")
        called = getattr(importlib.import_module(module), function)
        try:
            sys.exit(called(request["arguments"]))
        except SystemExit as ended:
            if isinstance(ended.code, int | None):
                _end(ended.code or 0)
            raise


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but do not take apart what was imported: with torch that is a quarter of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; returns it in the forked process, and None in this one when nobody will ask any more."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    ours = os.getpid()
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(running)
        if requests in ready:
            message, numbers, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 4)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.detach()
                die_with_parent(ours)
                return _become(json.loads(message), numbers)
            for number in numbers[:3]:
                os.close(number)
            os.setpgid(pid, pid)
            running[pid] = numbers[3]
            os.write(numbers[3], b"%d\n" % pid)


def _report_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number = running.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(number, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(number)


def _become(request: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
    for number, theirs in enumerate(numbers[:3]):
        os.dup2(theirs, number)
    os.closerange(3, max(numbers) + 64)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    return request


if __name__ == "__main__":
    main()
