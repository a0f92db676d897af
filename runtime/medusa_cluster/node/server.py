"""The node server: the process that starts, watches and ends everything that a machine runs for its cluster."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import IO

from aiohttp import web
from medusa_runtime.errors import ConfigError, MedusaError
from medusa_runtime.logs import log_to_file
from medusa_runtime.node.watchdog import Watchdog
from medusa_runtime.process import adopt_orphans
from medusa_runtime.storage.peer_access import read_token

from ..json_lines import JsonLinesServer
from ..transport.agent_regions import AgentRegions
from ..transport.pacing import Pacer
from ..transport.regions import RegionRoutes
from .agent import Agent
from .conflicts import check_name, check_ray_ports
from .controller_client import ControllerClient
from .forwarding import Forwarder
from .http_server import NodeHttpServer
from .instance_readers import MetricsReader, ReadinessReader, TimelineReader
from .instances import Instances
from .logs import Logs
from .operations import Operations
from .processes.child import OUT_OF_MEMORY, Child, RestartingChild, end_orphans
from .processes.guard import reap_orphans
from .processes.keeper import KeeperWatch
from .processes.ping_watchdog import PingWatchdog
from .processes.stopped import StoppedProcesses
from .ray.processes import STARTED_LINE, forget_address, ray_command, ray_environment
from .settings import NodeServerSettings, TlsFiles, make_token

logger = logging.getLogger(__name__)

_DRAIN_S = 30.0
_RAY_GRACE_S = 8.0
_POLL_S = 0.25
_HUNG_S = 1.5  # enough, since the controller and the node actor do nothing slow in their event loops
_LAUNCH_PAUSE_S = 1.0
_READY_STATES = ("alive", "draining", "drained")  # states of a node that takes the controller's orders


class NodeServer:
    """A node server. It runs until SIGTERM, SIGINT or SIGHUP, lets requests finish, and leaves nothing behind."""

    def __init__(self, settings: NodeServerSettings, show: Callable[[str], None], keeper: KeeperWatch) -> None:
        """Make a node server. ``show`` prints a line for the user."""
        self._settings = settings
        self._keeper = keeper
        self._keeper_hung = False  # the keeper hangs
        self._show = show
        self._stop = asyncio.Event()
        self._signals = 0
        self._ray_address: str | None = None
        self._ray_started = asyncio.Event()
        self._launcher: Child | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._watchdog = Watchdog("the node server")

    async def run(self) -> int:
        """Run until asked to stop, and return the exit status.

        Raises ConfigError or ClusterError if the node server cannot start.
        """
        settings = self._settings
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        with _lock(settings):
            if settings.is_head and not settings.token_file.exists():
                make_token(settings.token_file)
            _renew_certificates(settings)
            access = settings.access()
            for folder in (settings.log_folder, settings.folder / "ray", settings.folder / "gcs"):
                folder.mkdir(exist_ok=True, mode=0o700)
            log_to_file(settings.log_folder / "node.log")
            pacer = Pacer()
            self._regions = AgentRegions(str(settings.agent_socket))
            self._controller = ControllerClient(settings, access)
            self._agent = Agent(settings)
            self._instances = Instances(settings)
            peers = RegionRoutes(self._regions, pacer)
            self._operations = Operations(settings, self._agent, self._instances, self._controller, peers, pacer)
            routes = [*peers.routes(), *Logs(settings.log_folder).routes(), web.get("/status", self._status)]
            self._http_server = NodeHttpServer(settings, access, Forwarder(self._instances), self._controller, routes)
            self._control = JsonLinesServer(settings.control_socket, self._operations.answer)
            self._ray = RestartingChild(self._start_ray, self._on_ray_end)
            try:
                await self._unless_stopped(self._start())
                await self._stop.wait()
            finally:
                await self._end()
                if self._keeper_hung:
                    self._keeper.end()
        return 0

    async def _unless_stopped(self, starting: Coroutine[None, None, None]) -> None:
        """Await the start, but cancel it when the node server is asked to stop."""
        started, stopped = asyncio.create_task(starting), asyncio.create_task(self._stop.wait())
        await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not started.done():
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
            return
        await started

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:  # the user is impatient: do not wait for running requests
            for task in asyncio.all_tasks():
                if task.get_name() == "drain":
                    task.cancel()

    async def _start(self) -> None:
        settings = self._settings
        if settings.head_url is not None:
            joined = await self._controller.ask_head(settings.head_url, "join", {"name": settings.name})
            self._ray_address = str(joined["ray"])
        await check_name(settings, self._controller)
        await check_ray_ports(settings)
        self._instances.gpus.begin()
        await self._http_server.start()
        await self._control.start()
        self._agent.begin()
        self._ray.begin()
        self._watchdog.start()
        actor = PingWatchdog("the node actor", settings.actor_socket, _HUNG_S, "ray::NodeActor")
        readers = (reader(self._instances).run() for reader in (ReadinessReader, TimelineReader, MetricsReader))
        works = (self._watch_processes(), self._announce_ready(), *readers, actor.run())
        self._tasks = [asyncio.create_task(work) for work in works]
        self._show(f"node {settings.name} on {settings.url}, folder {settings.folder}")
        if settings.is_head:
            watch = PingWatchdog("the controller", settings.controller_socket, _HUNG_S, "ray::Controller")
            self._tasks += [asyncio.create_task(work) for work in (self._keep_controller(), watch.run())]
            encrypted = " --tls" if settings.makes_certificates else ""
            self._show(f"other nodes: medusa cluster start --address {settings.address} --token-file FILE{encrypted}")
            self._show(f"(FILE: a copy of {settings.token_file})")
            if settings.tls is None:
                self._show("nothing that nodes send is encrypted, the token included; with --tls on every node, it is")

    async def _status(self, _: web.Request) -> web.Response:
        """Answer the controller, for which the answer is also the node's heartbeat."""
        return web.json_response(await self._operations.answer({"op": "status"}))

    def _start_ray(self) -> Child:
        settings = self._settings
        forget_address(settings)
        guard = [sys.executable, "-m", "medusa_cluster.node.processes.guard"]
        command = [*guard, *ray_command(settings, self._ray_address)]
        return Child(
            command, ray_environment(settings, os.environ), settings.log_folder / "ray.log", self._on_ray_output
        )

    def _on_ray_output(self, line: str) -> None:
        if STARTED_LINE in line:
            self._ray_started.set()

    async def _on_ray_end(self, child: Child) -> None:
        self._ray_started.clear()
        logger.error("Ray's processes ended (%s): %s; starting them again", child.how, child.last_words)

    async def _announce_ready(self) -> None:
        """Show the line "ready" once the controller knows this node and answers gateways."""
        await self._ray_started.wait()
        settings = self._settings
        while True:
            with suppress(MedusaError):  # any: the head may be restarting, or behind a proxy that answers for it
                await self._controller.call("routes", {})
                nodes = (await self._controller.call("status", {}))["nodes"]
                mine = next((node for node in nodes if node["name"] == settings.name), None)
                if mine is not None and mine["state"] in _READY_STATES and mine["address"] == settings.address:
                    break
            await asyncio.sleep(_POLL_S)
        self._show("ready")

    async def _keep_controller(self) -> None:
        """Create the controller once Ray is up, and after each restart of Ray, when it usually exists already."""
        settings = self._settings
        launch = [sys.executable, "-m", "medusa_cluster.controller.launch"]
        while True:
            await self._ray_started.wait()
            try:
                child = self._launcher = Child(
                    [*launch, f"{settings.host}:{settings.ray_port}"],
                    ray_environment(settings, os.environ),
                    settings.log_folder / "controller-launch.log",
                )
                failure: object = child.last_words if await child.wait() != 0 else None
            except OSError as error:  # out of memory, processes or descriptors
                failure = error
            if failure is not None:
                logger.warning("the controller could not be created: %s", failure)
                await asyncio.sleep(_LAUNCH_PAUSE_S)
                continue
            while self._ray_started.is_set():
                await asyncio.sleep(_POLL_S)

    async def _watch_processes(self) -> None:
        stopped = StoppedProcesses()
        while True:
            self._watchdog.beat()
            reap_orphans(self._own_pids())
            stopped.check()
            if not self._keeper.check():
                self._keeper_hung = True
                self._stop.set()
            if OUT_OF_MEMORY.look():
                logger.error("%s: the kernel has killed a process of this node", OUT_OF_MEMORY.words())
            await asyncio.sleep(_POLL_S)

    def _own_pids(self) -> set[int]:
        """Return the processes whose exit status their ``Child`` collects."""
        children = (self._ray.child, self._launcher)
        pids = {child.pid for child in children if child is not None} | self._instances.pids
        return pids if self._agent.pid is None else pids | {self._agent.pid}

    async def _end(self) -> None:
        self._watchdog.close()
        self._operations.draining = True  # shown in the status, so gateways send no new requests
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        drain = asyncio.create_task(self._instances.end(_DRAIN_S), name="drain")
        await asyncio.gather(drain, return_exceptions=True)
        self._instances.gpus.close()
        await self._http_server.close()
        self._regions.close()
        await self._control.close()
        if self._launcher is not None:
            await self._launcher.end(0.0)
        await asyncio.gather(self._agent.end(), self._ray.end(_RAY_GRACE_S))
        await self._controller.close()
        for socket in (self._settings.controller_socket, self._settings.actor_socket):
            socket.unlink(missing_ok=True)
        await end_orphans(set())


def _lock(settings: NodeServerSettings) -> IO[str]:
    """Lock the node's folder until the returned file is closed. Raises ConfigError while another node server has it."""
    path = settings.folder / "lock"
    file = open(path, "a+")  # noqa: SIM115  the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise ConfigError(
            f"--dir: a node server runs in {settings.folder} already (process {holder}); give this one another folder"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _renew_certificates(settings: NodeServerSettings) -> None:
    """Make this start's certificates from the token, or remove an earlier start's, which commands would use.

    Raises ConfigError if something in the way cannot be removed.
    """
    folder = TlsFiles.below(settings.folder).key.parent
    try:
        if not settings.makes_certificates or not _is_private(folder):
            _remove(folder)
        if settings.makes_certificates and settings.tls is not None:
            from .certificates import write_certificates  # with a package that others need not have

            write_certificates(read_token(str(settings.token_file)), settings.tls, settings.host)
    except OSError as error:
        raise ConfigError(f"--dir: {folder} cannot be used: {error.strerror}; remove it") from None


def _is_private(folder: Path) -> bool:
    """Return whether this is a folder itself, and no link, that only this user can enter."""
    with suppress(FileNotFoundError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return False


def _remove(path: Path) -> None:
    """Remove a folder with what is in it, but of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def serve(settings: NodeServerSettings, show: Callable[[str], None], keeper: KeeperWatch) -> int:
    """Run a node server in this process, which is the keeper's child."""

    async def run() -> int:
        return await NodeServer(settings, show, keeper).run()

    return asyncio.run(run())
