"""The function process: gunicorn with one threaded worker on the socket that the supervisor bound at t=0."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from medusa_runtime.liveness import Heartbeats, Watchdog
from medusa_runtime.process import die_with_parent, name_process
from medusa_runtime.resource_limits import LEAST_FILES, most_files

from ..platform import Platform
from ..probes import Probes
from .probe_acceptor import KEEPALIVE_S, ProbeAcceptor

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.instance import InstanceHandle

    from ..service import Service
    from .wsgi_gateway import WsgiGateway

logger = logging.getLogger(__name__)

_SPARE_THREADS = 32  # for probes, metrics and requests that are about to be refused
_IDLE_CONNECTIONS = 2048
_LARGEST_BODIES = 8  # for which there is memory at the same time, if nothing else was set
STOP_GRACE_S = 1  # for responses that have been made, and idle connections


def serve(
    listener: socket.socket, instance: InstanceHandle, settings: Settings, platform: Platform | None = None
) -> int:
    """Serve on ``listener`` until SIGTERM; returns the exit status. Runs in a forked process without threads."""
    platform = platform or Platform()
    probes = Probes(settings, platform, instance.region, instance.heartbeats)
    _publish_start(probes, instance, settings)
    instance.heartbeats.enter("function")
    watchdog = Watchdog(instance.heartbeats)
    acceptor = ProbeAcceptor(
        listener, probes, read_timeout_s=settings.read_timeout_s, tick=partial(_watch, watchdog, instance.heartbeats)
    )
    acceptor.open()
    acceptor.stand_still_over_forks()
    with instance.timeline.stage("server"):
        # gunicorn costs about 110 ms to import; the supervisor does not need it.
        from .gunicorn_worker import FunctionServer

        application = FunctionServer(
            acceptor,
            settings,
            probes,
            boot=lambda: _boot(instance, settings, platform, probes),
            starting=lambda: _publish_start(probes, instance, settings),
        )
    _keep_sigterm_over_forks()
    try:
        application.run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _publish_start(probes: Probes, instance: InstanceHandle, settings: Settings) -> None:
    """Set what probes report until a worker says more: before the first one, and again when one has died."""
    waits = "starting" if settings.engine_start == "now" else "idle"
    engine, function = waits if instance.engine else "", "loading" if settings.handler else ""
    probes.publish(ready=False, draining=False, engine=engine, function=function)
    probes.set_bodies_full(False)


def _watch(watchdog: Watchdog, heartbeats: Heartbeats) -> None:
    """Look at the worker, which is this process's child, and at the supervisor, which only the platform can replace."""
    heartbeats.beat("function")
    watchdog.look("worker", heartbeats.pid("worker"), os.getpid())
    watchdog.look("supervisor", heartbeats.pid("supervisor"), 0)


def _boot(
    instance: InstanceHandle, settings: Settings, platform: Platform, probes: Probes
) -> tuple[WsgiGateway, Callable[[], bool]]:
    """Make, in the worker, the WSGI callable and what drains it. What takes long is made in the background."""
    from ..service import Service
    from .wsgi_gateway import WsgiGateway

    # A hundred streams that wake at once must not make a probe wait for a whole interval (5 ms) of each.
    sys.setswitchinterval(0.001)
    service = Service(instance, settings, platform, probes)

    def build() -> Any:
        from ..http.app import create_app  # imports Flask, 100 to 200 ms

        if service.engine is None:
            return create_app(service)
        from ..openai.routes import model_routes

        return create_app(service, model_routes)

    gateway = WsgiGateway(service, build)
    if settings.handler is not None:
        from ..user_code.function import UserFunction

        service.function = UserFunction(
            settings, service.model, service.timeline, fail=instance.fail, on_loaded=service.function_loaded
        )
    service.publish()
    if instance.engine is not None:
        instance.engine.changed = service.publish
        if settings.engine_start == "now":
            instance.engine.start()
    threading.Thread(target=_warm, args=(service, gateway), name="load-handler", daemon=True).start()

    def drain() -> bool:
        """Go on answering after SIGTERM, no longer ready, until the last request has been served."""
        service.draining.set()
        service.publish()
        if waiting := service.admission.in_flight:
            again = "; Ctrl-C again ends" if sys.stderr.isatty() else f", for at most {settings.drain_s:g} s"
            logger.info("waiting for %d request%s%s", waiting, "s" * (waiting != 1), again)
        if platform.stop is not None:
            platform.stop()
        deadline = time.monotonic() + settings.drain_s
        time.sleep(min(platform.linger_s, settings.drain_s))
        idle = service.admission.wait_idle(deadline - time.monotonic())
        if service.function is not None:
            service.function.close()
        return idle

    return gateway, drain


def _warm(service: Service, gateway: WsgiGateway) -> None:
    with service.timeline.stage("app"):
        gateway.app()
    if service.function is not None:
        service.function.load()
    # Imported for good: a full collection that looked at all of it would hold up a hundred streams and every probe.
    gc.freeze()
    if service.engine is None and service.ready:
        service.timeline.mark("ready")


def worker_folder() -> str | None:
    """Where gunicorn's worker keeps its (unlinked) heartbeat file; memory where there is some."""
    return None if os.access("/dev/shm", os.W_OK) else "/tmp"


def body_memory_mb(settings: Settings) -> int:
    """What request bodies may take in sum: at least one of the largest."""
    return max(settings.body_memory_mb or _LARGEST_BODIES * settings.max_body_mb, settings.max_body_mb + 4)


def threads(settings: Settings) -> int:
    return settings.max_concurrency + settings.max_waiting + _SPARE_THREADS


def options(acceptor: ProbeAcceptor, settings: Settings, heartbeats: Heartbeats) -> dict[str, Any]:
    """gunicorn's settings. No timeout (a model may take long), no control socket, no access log."""
    return {
        "workers": 1,
        "worker_class": "medusa_handler.server.gunicorn_worker.Worker",
        "threads": threads(settings),
        # One more would end gunicorn's worker when the process may open no further file.
        "worker_connections": min(threads(settings) + _IDLE_CONNECTIONS, most_files() - LEAST_FILES // 2),
        "worker_tmp_dir": worker_folder() or "/dev/shm",
        "timeout": 0,
        "graceful_timeout": math.ceil(settings.drain_s) + 2 * STOP_GRACE_S,
        "keepalive": int(KEEPALIVE_S),
        "limit_request_line": 8190,
        "limit_request_fields": 100,
        "limit_request_field_size": 8190,
        # A proxy beside us (queue-proxy) passes on what clients send: no header of theirs may move our routes.
        "forwarded_allow_ips": "",
        "forwarder_headers": "",
        "control_socket_disable": True,
        "loglevel": "warning",
        "accesslog": None,
        "proc_name": "function",
        "on_starting": partial(_listen_at, acceptor),
        "pre_fork": lambda arbiter, _worker: arbiter.app.starting(),
        "post_fork": partial(_in_worker, acceptor, heartbeats),
    }


def _keep_sigterm_over_forks() -> None:
    """Hold SIGTERM back during a fork: until a child has its own handlers, gunicorn's would lose the signal."""

    def default() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
        after_in_child=default,
    )


def _listen_at(acceptor: ProbeAcceptor, arbiter: Any) -> None:
    arbiter.LISTENERS = [acceptor.handoff]  # gunicorn makes its own only where there are none


def _in_worker(acceptor: ProbeAcceptor, heartbeats: Heartbeats, arbiter: Any, _worker: Any) -> None:
    heartbeats.enter("worker")
    acceptor.close_in_worker()
    die_with_parent(arbiter.pid)
    name_process("worker")
