"""The laboratory: nodes on this machine, which are namespaces on a switch, with links of a given speed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from medusa_runtime.errors import ConfigError, LabError

from . import kernel
from .link_speed import LinkSpeed
from .network import Network, find_tools
from .quota import make_cgroups

ORIGIN = "origin"
SWITCH = "switch"
ORIGIN_PORT = 80
MOST_NODES = 64
_NETWORK = "10.77.0"
_SWITCH_HOST = 254
_ORIGIN_HOST = 253


@dataclass
class _Node:
    holder: subprocess.Popen[str]
    pid: int
    cgroups: list[Path] = field(default_factory=list)


class Laboratory:
    """A laboratory with the nodes ``n1``, ``n2`` and so on, and the node ``origin``. A context manager. Needs root.

    Each node has its own network with the interface eth0, its own processes, hostname and /dev/shm. Files are the
    machine's. ``link`` limits what each node sends and receives, and ``cpus`` the cores of each; ``quotas`` says in a
    line whether this machine can do that. ``cores`` maps nodes to the processors on which their programs run; other
    nodes' programs run on the caller's. ``origin`` maps names to folders, which the node ``origin`` serves over HTTP
    under ``origin_url/NAME``. Everything ends with this process, however that ends. Nodes cannot reach the outside.
    """

    def __init__(
        self,
        nodes: int,
        link: str | LinkSpeed | None = None,
        *,
        cpus: float | None = None,
        cores: Mapping[str, Collection[int]] | None = None,
        origin: Mapping[str, Path] | None = None,
        origin_link: str | LinkSpeed | None = None,
    ) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise ConfigError(f"--nodes: expected a number from 1 to {MOST_NODES}, found {nodes}")
        if cpus is not None and not 0.01 <= cpus <= 1024:
            raise ConfigError(f"--cpus: expected a number of cores from 0.01 to 1024, found {cpus:g}")
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.link = LinkSpeed.parse(link) if isinstance(link, str) else link
        self.origin_link = LinkSpeed.parse(origin_link) if isinstance(origin_link, str) else origin_link or self.link
        self.cpus = cpus
        self.cores = dict(cores or {})
        self.quotas = "no processor quotas were asked for"
        self.origin: subprocess.Popen[str] | None = None
        self.folder = Path()
        self.served = dict(origin or {})
        self._running_nodes: dict[str, _Node] = {}
        self._cgroups: dict[str, Path] = {}
        self._launched: list[subprocess.Popen[Any]] = []
        self._stack = ExitStack()
        self._network: Network

    def __enter__(self) -> Self:
        check_machine()
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="medusa-lab-"))
            self.folder.chmod(0o755)
            self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._stack.callback(self._end_all)
            if self.cpus is not None:
                try:
                    self._cgroups = make_cgroups(self.nodes, self.cpus)
                    self.quotas = f"{self.cpus:g} cores for each node"
                except LabError as error:
                    self.quotas = str(error)
            self._start_node(SWITCH)
            self._network = Network(self._running_nodes[SWITCH].pid, f"{_NETWORK}.{_SWITCH_HOST}/24")
            for node in (*self.nodes, ORIGIN):
                self.boot(node)
            if self.served:
                self.start_origin()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process in every node at once, and the laboratory. Can be called twice."""
        self._stack.close()

    # Nodes

    def address(self, node: str) -> str:
        host = {ORIGIN: _ORIGIN_HOST, SWITCH: _SWITCH_HOST}.get(node)
        return f"{_NETWORK}.{host or self.nodes.index(node) + 1}"

    def pid(self, node: str) -> int:
        """Return the pid of the node's first process, as this process sees it."""
        return self._running_nodes[node].pid

    def node_folder(self, node: str) -> Path:
        """Return a folder for the node's own files, with a short path. It is removed with the node."""
        return self.folder / node

    def boot(self, node: str) -> None:
        """Start a node that has crashed, with a new folder. Raises LabError if it runs, or had a processor quota."""
        if node in self._running_nodes:
            raise LabError(f"{node} runs already")
        if node in self._cgroups and not self._cgroups[node].exists():
            raise LabError(f"{node}'s processor quota went with its crash")
        pid = self._start_node(node)
        self._network.plug(node, pid, f"{self.address(node)}/24", self.origin_link if node == ORIGIN else self.link)

    def crash(self, node: str) -> None:
        """End a node like a power cut. Every process in it is gone when this returns."""
        self._network.unplug(node)
        holder = self._running_nodes.pop(node).holder
        holder.terminate()
        holder.wait()

    def cut(self, node: str) -> None:
        """Pull the node's network cable."""
        self._network.cut(node)

    def restore(self, node: str) -> None:
        """Plug the node's network cable in again."""
        self._network.restore(node)

    def sent_bytes(self, node: str) -> int:
        """Return how many bytes the node has sent since it was started, headers included."""
        return self._interface_counter(node, 8)

    def received_bytes(self, node: str) -> int:
        return self._interface_counter(node, 0)

    @property
    def origin_sent_bytes(self) -> int:
        return self.sent_bytes(ORIGIN)

    @property
    def origin_url(self) -> str:
        return f"http://{self.address(ORIGIN)}"

    # Programs

    def popen(self, node: str, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a node. ``options`` are those of ``subprocess.Popen``.

        The returned process passes SIGTERM and the like on to the program, and ends as the program ends. SIGKILL ends
        both. SIGSTOP does not reach the program; use ``processes`` for that.
        """
        running = self._running_nodes[node]
        folder = os.path.abspath(options.pop("cwd", None) or os.getcwd())
        launch = [sys.executable, "-m", "medusa_cluster.lab.launcher", str(running.pid), folder]
        launch.append(":".join(map(str, running.cgroups)))
        with self._on_cores(node):
            process = subprocess.Popen([*launch, *map(str, command)], start_new_session=True, **options)
        self._launched = [other for other in self._launched if other.poll() is None] + [process]
        return process

    @contextmanager
    def _on_cores(self, node: str) -> Iterator[None]:
        """Make programs that this thread starts run on the node's processors."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores.get(node, before))
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def run(self, node: str, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a program in a node to its end. ``options`` are those of ``subprocess.run``."""
        data, timeout_s = options.pop("input", None), options.pop("timeout", None)
        check = options.pop("check", False)
        if options.pop("capture_output", False):
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if data is not None:
            options["stdin"] = subprocess.PIPE
        with self.popen(node, command, **options) as process:
            try:
                out, err = process.communicate(data, timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        result = subprocess.CompletedProcess(command, process.returncode, out, err)
        if check:
            result.check_returncode()
        return result

    def processes(self, node: str) -> dict[int, str]:
        """Return the node's processes except the first: pid, as this process sees it → command line."""
        own = os.readlink(f"/proc/{self.pid(node)}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid(node):
                with suppress(OSError):
                    if os.readlink(entry / "ns/pid") == own:
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    @contextmanager
    def network(self, node: str) -> Iterator[None]:
        """Make the calling thread open sockets in the node's network while the block runs. They stay there."""
        with open("/proc/thread-self/ns/net") as here:
            kernel.enter(self.pid(node), kernel.NEWNET)
            try:
                yield
            finally:
                kernel.enter_namespace(here.fileno())

    def start_origin(self) -> None:
        """Serve the folders from the node ``origin``, perhaps again after its process or node has died."""
        folders = [f"{name}={folder}" for name, folder in self.served.items()]
        listen = f"{self.address(ORIGIN)}:{ORIGIN_PORT}"
        command = [sys.executable, "-m", "medusa_cluster.lab.origin", listen, *folders]
        self.origin = self.popen(ORIGIN, command, stdout=subprocess.PIPE, text=True)
        if not _first_line(self.origin):
            raise LabError("the laboratory's origin did not start; its message is above")

    def forward(self, port: int, node: str, node_port: int) -> str:
        """Listen on ``port`` of this machine's 127.0.0.1 (0: a free one), pass connections on, and return the URL."""
        target = f"{self.address(node)}:{node_port}"
        command = [sys.executable, "-m", "medusa_cluster.lab.forwarder", str(os.getpid())]
        command += [str(self.pid(SWITCH)), str(port), target]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._launched.append(process)
        self._stack.callback(process.terminate)
        answer = _first_line(process)
        if not answer.isdigit():
            raise LabError(f"port {port} of 127.0.0.1 cannot be opened: {answer}")
        return f"http://127.0.0.1:{answer}"

    def _start_node(self, node: str) -> int:
        folder = self.folder / node
        folder.mkdir()
        names = [f"{self.address(other)} {other}\n" for other in (*self.nodes, ORIGIN, SWITCH)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        cgroups = [self._cgroups[node]] if node in self._cgroups else []
        command = [sys.executable, "-m", "medusa_cluster.lab.holder", str(os.getpid()), node, str(folder)]
        holder = subprocess.Popen(
            [*command, *map(str, cgroups)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        answer = json.loads(_first_line(holder) or '{"error": "its process ended"}')
        if "error" in answer:
            holder.wait()
            raise LabError(f"{node} cannot be made: {answer['error']}")
        self._running_nodes[node] = _Node(holder, answer["pid"], cgroups)
        return self._running_nodes[node].pid

    def _interface_counter(self, node: str, column: int) -> int:
        for line in Path(f"/proc/{self.pid(node)}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                return int(numbers.split()[column])
        raise LabError(f"{node} has no interface eth0")

    def _end_all(self) -> None:
        for running in self._running_nodes.values():
            running.holder.terminate()
        for running in self._running_nodes.values():
            running.holder.wait()
        self._running_nodes.clear()
        for process in self._launched:
            process.wait()
        self._launched.clear()


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    with process.stdout as output:
        return output.readline().strip()


def check_machine() -> None:
    """Raise ConfigError unless this process can make a laboratory on this machine."""
    missing = kernel.missing_capabilities() if sys.platform == "linux" else ["Linux"]
    if missing:
        raise ConfigError(
            "medusa cluster lab makes network namespaces, which needs root; this process lacks "
            f"{' and '.join(missing)}. Try: sudo medusa cluster lab …"
        )
    find_tools()
