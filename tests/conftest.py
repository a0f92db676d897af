"""Real `medusa node` processes, for the tests of the agent and of the functions that use it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import fake_nvml as fake_nvml_library
import medusa_cluster  # noqa: F401  makes --engine cluster known
import medusa_vllm  # noqa: F401  makes --engine vllm known
import pytest
from fork_server import (
    MEDUSA_MAIN,
    OF_CLUSTERS,
    OF_FUNCTIONS,
    ForkServer,
    asked_for,
    end_shared,
    server_of,
    share,
    shared_pids,
)
from forked_workers import fork_workers
from medusa_runtime.errors import NodeError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.process import share_cores
from plain_environ import plain_environ
from process_tree import alive, descendants
from vllm_installed import vllm_is_installed

MEDUSA = Path(sys.executable).with_name("medusa")
PATIENCE_S = 120.0


def keep_state_apart() -> None:
    """Put the key of bundles that tests materialize elsewhere than the user's own. Workers share the first's."""
    prefix = os.path.join(tempfile.gettempdir(), "medusa-tests-")
    if os.environ.get("XDG_STATE_HOME", "").startswith(prefix):
        return
    made, maker = tempfile.mkdtemp(prefix="medusa-tests-"), os.getpid()
    os.environ["XDG_STATE_HOME"] = made
    atexit.register(lambda: os.getpid() == maker and shutil.rmtree(made, ignore_errors=True))


keep_state_apart()

# OpenMP reads it when torch is imported, which a conftest below this one may do: another worker wants the cores.
share_cores()


class NodeProcess:
    """One agent on a socket in a short path; its output is kept in a file."""

    def __init__(
        self, folder: Path, *arguments: str, wrapper: Sequence[str] = (), fork_server: ForkServer | None = None
    ) -> None:
        self.folder = folder
        self.wrapper = wrapper
        self.fork_server = None if wrapper else fork_server
        self.socket = str(folder / "node.sock")
        self.log = folder / "node.log"
        self.arguments = arguments
        self.clients: list[NodeClient] = []
        self.start()

    def start(self, wait: bool = True) -> None:
        """Once more, after it has ended."""
        environment = plain_environ()
        self._began = self.log.stat().st_size if self.log.exists() else 0
        environment["PYTHONUNBUFFERED"] = "1"
        words = ["node", "--socket", self.socket, *self.arguments]
        with open(self.log, "ab") as log:
            if self.fork_server is not None:
                self.process: Any = self.fork_server.start(MEDUSA_MAIN, words, environ=environment, log=log)
            else:
                self.process = subprocess.Popen(
                    [*self.wrapper, MEDUSA, *words], stdout=log, stderr=subprocess.STDOUT, env=environment
                )
        if wait:
            self.until(lambda: "node agent on" in self.output() or self.process.poll() is not None)
            assert self.process.poll() is None, self.output()

    def output(self) -> str:
        return self.log.read_bytes()[self._began :].decode(errors="replace")

    def client(self) -> NodeClient:
        """A connection, which is closed at the end of the test at the latest."""
        client = NodeClient(self.socket)
        self.clients.append(client)
        return client

    def status(self) -> dict[str, Any]:
        client = self.client()
        try:
            return client.status()
        finally:
            client.close()

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        ran = self.process.poll() is None
        while not condition():
            if ran and self.process.poll() is not None and not condition():  # it may have ended just before
                pytest.fail(f"the agent has ended with {self.process.poll()}:\n{self.output()}")
            if time.monotonic() > deadline:
                pytest.fail(f"it did not come to pass within {PATIENCE_S:g} s:\n{self.output()}")
            time.sleep(0.02)

    def wait_warm(self, kind: str = "torch") -> None:
        def warm() -> bool:
            engines = self.status()["engines"][kind]
            assert engines["failure"] is None, self.output()
            return bool(engines["warm"] == engines["wanted"])

        self.until(warm)

    def children(self) -> dict[int, str]:
        return descendants(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit status. Nothing of it is left."""
        children = self.children()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(PATIENCE_S)
        self.until(lambda: not any(alive(pid) for pid in children))
        assert not os.path.exists(self.socket)
        return status

    def reachable(self) -> bool:
        try:
            self.client().close()
        except NodeError:
            return False
        return True


def pytest_configure(config: pytest.Config) -> None:
    """Whoever runs the tests in the background (nohup, a shell's &) has these ignored, which processes inherit."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    workers = config.getoption("numprocesses", None)
    signal.signal(signal.SIGTERM, partial(_stop, os.getpid(), bool(workers)))
    if workers:
        share(*OF_FUNCTIONS)
        share(*OF_CLUSTERS)
        chosen = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
        fork_workers(len(config.getoption("tx")), Path(__file__).parent, chosen)


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        end_shared()


class Frozen:
    """Exempts from garbage collection what is imported. Scanning it took a quarter of the tests' time."""

    modules = 0

    @classmethod
    def renew(cls) -> None:
        cls.modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        Frozen.renew()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if len(sys.modules) > Frozen.modules + 200:  # the test before has imported something large
        Frozen.renew()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = {}
    if os.geteuid():
        absent["root"] = pytest.mark.skip("needs root, to become other users, to mount or to make namespaces")
    if not vllm_is_installed():
        absent["vllm"] = pytest.mark.skip("vLLM is not installed; see `make test-vllm`")
    for item in items:
        for name, skip in absent.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


def _stop(tests: int, has_workers: bool, number: int, frame: FrameType | None) -> None:
    """End the tests at SIGTERM as at Ctrl-C, through the fixtures that end what was started."""
    if os.getpid() == tests:
        children = set(map(int, Path(f"/proc/self/task/{tests}/children").read_text().split()))
        for worker in children - shared_pids() if has_workers else ():
            os.kill(worker, number)  # xdist would kill them
        signal.default_int_handler(number, frame)
    signal.signal(number, signal.SIG_DFL)  # in a process that a test has forked
    os.kill(os.getpid(), number)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Has imported what functions and node agents consist of."""
    with server_of(*OF_FUNCTIONS) as server:
        yield server


@contextlib.contextmanager
def nodes(request: pytest.FixtureRequest) -> Iterator[Callable[..., NodeProcess]]:
    server = asked_for(request)
    started: list[NodeProcess] = []

    def start(*arguments: str, wrapper: Sequence[str] = ()) -> NodeProcess:
        folder = Path(tempfile.mkdtemp(prefix="n"))
        folder.chmod(0o777 if wrapper else 0o755)  # it may be another user's
        started.append(NodeProcess(folder, *arguments, wrapper=wrapper, fork_server=server))
        return started[-1]

    yield start
    for node in started:
        for client in node.clients:
            client.close()
        children = node.children() if node.process.poll() is None else {}
        node.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(node.folder)


@pytest.fixture
def start_node(request: pytest.FixtureRequest) -> Iterator[Callable[..., NodeProcess]]:
    """Start `medusa node` with these arguments; what the test leaves running is killed."""
    with nodes(request) as start:
        yield start


@pytest.fixture(scope="module")
def start_node_module(request: pytest.FixtureRequest) -> Iterator[Callable[..., NodeProcess]]:
    """Start nodes that all tests of a file share."""
    with nodes(request) as start:
        yield start


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a fake libnvidia-ml.so.1."""
    return fake_nvml_library.build(tmp_path_factory.mktemp("nvml"))
