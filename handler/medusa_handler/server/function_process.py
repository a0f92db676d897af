"""The function process: gunicorn with one threaded worker on the socket that the supervisor bound at t=0."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from medusa_runtime.container_limits import OutOfMemory
from medusa_runtime.errors import MedusaError
from medusa_runtime.liveness import Heartbeats, Watchdog

from ..platform import Platform
from ..probes import Probes
from .probe_acceptor import ProbeAcceptor

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.instance import InstanceHandle

    from ..service import Service
    from .wsgi_gateway import WsgiGateway

logger = logging.getLogger(__name__)


def serve(
    listener: socket.socket, instance: InstanceHandle, settings: Settings, platform: Platform | None = None
) -> int:
    """Serve on ``listener`` until SIGTERM, and return the exit status. Call it in a forked process without threads."""
    platform = platform or Platform()
    _check(settings)
    probes = Probes(settings, platform, instance.region, instance.heartbeats)
    _publish_start(probes, instance, settings)
    instance.heartbeats.enter("function")
    watchdog, out_of_memory = Watchdog(instance.heartbeats), OutOfMemory()
    out_of_memory.look()
    acceptor = ProbeAcceptor(
        listener,
        probes,
        read_timeout_s=settings.read_timeout_s,
        tick=partial(_watch, watchdog, instance.heartbeats, out_of_memory),
        max_body_bytes=settings.max_body_bytes,
        cors_origins=settings.cors_origins,
    )
    acceptor.open()
    acceptor.pause_during_forks()
    with instance.timeline.stage("server"):
        from .lean_gunicorn import import_leanly

        import_leanly()
        # gunicorn costs about 100 ms to import; the supervisor does not need it.
        from .gunicorn_worker import FunctionServer

        application = FunctionServer(
            acceptor,
            settings,
            probes,
            boot=lambda: _boot(instance, settings, platform, probes),
            starting=lambda: _publish_start(probes, instance, settings),
            out_of_memory=out_of_memory,
        )
    _block_sigterm_during_forks()
    try:
        application.run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def preimport() -> None:
    """Import what this process and its worker import, in the same order, for a process that will be continued."""
    from .lean_gunicorn import import_leanly as import_gunicorn

    import_gunicorn()
    from ..http.lean_flask import import_leanly as import_flask
    from . import gunicorn_worker  # noqa: F401

    import_flask()
    from .. import service  # noqa: F401
    from ..http import app  # noqa: F401
    from ..openai import calls, routes  # noqa: F401
    from ..user_code import function  # noqa: F401
    from . import wsgi_gateway  # noqa: F401


def _check(settings: Settings) -> None:
    """Check, before there is a worker, what each worker will need. Raises ConfigError and MissingPackageError."""
    if settings.vllm_args is not None:
        from ..service import http_support

        http_support(settings)
    if settings.api_key_file is not None:
        from .tokens import Tokens

        Tokens(None, settings.api_key_file)
    if settings.traces != "off":
        from medusa_runtime.spans import check_installed

        check_installed()


def _publish_start(probes: Probes, instance: InstanceHandle, settings: Settings) -> None:
    """Set what probes report until a worker says more: before the first one, and again when one has died."""
    waits = "starting" if settings.engine_start == "now" else "idle"
    engine, function = waits if instance.engine else "", "loading" if settings.handler else ""
    probes.publish(ready=False, draining=False, engine=engine, function=function)
    probes.set_bodies_full(False)


def _watch(watchdog: Watchdog, heartbeats: Heartbeats, out_of_memory: OutOfMemory) -> None:
    """Look at the worker, which is this process's child, and at the supervisor, which only the platform can replace."""
    heartbeats.beat("function")
    out_of_memory.look()
    # A worker that was killed would take the connections of its clients with it, so a stopped one is continued.
    watchdog.look("worker", heartbeats.pid("worker"), os.getpid(), resume=True)
    watchdog.look("supervisor", heartbeats.pid("supervisor"), 0)


def _boot(
    instance: InstanceHandle, settings: Settings, platform: Platform, probes: Probes
) -> tuple[WsgiGateway, Callable[[], bool]]:
    """Return the WSGI callable, and the function that drains it. Runs in the worker; slow parts load beside it."""
    from ..service import Service
    from .wsgi_gateway import WsgiGateway

    # By default, each thread may keep the interpreter for 5 ms. After a hundred streams that wake at once, a probe
    # would wait for half a second.
    sys.setswitchinterval(0.001)
    service = Service(instance, settings, platform, probes)

    def build() -> Any:
        from ..http.lean_flask import import_leanly

        import_leanly()
        from ..http.app import create_app  # imports Flask, 50 to 100 ms

        if service.engine is None:
            return create_app(service)
        from ..openai.routes import model_routes

        return create_app(service, model_routes)

    try:
        gateway = WsgiGateway(service, build)
    except MedusaError as error:
        instance.fail(error)
        raise
    if settings.handler is not None:
        from ..user_code.function import UserFunction

        service.function = UserFunction(
            settings, service.model, service.timeline, fail=instance.fail, on_loaded=service.function_loaded
        )
    service.publish()
    if instance.engine is not None:
        instance.engine.on_change = service.engine_changed
        if settings.engine_start == "now":
            instance.engine.start()
    threading.Thread(target=_warm, args=(service, gateway), name="load-handler", daemon=True).start()

    def drain() -> bool:
        """Keep answering after SIGTERM, reported as not ready, until no request is left. Return whether none is."""
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
        if not idle:
            running = service.admission.in_flight
            ended = f"{running} request{'s' * (running != 1)} had not ended within {settings.drain_s:g} s"
            logger.warning("%s and will be cut off; --drain-s sets how long they may take", ended)
        if service.function is not None:
            service.function.close()
        if gateway.tracer is not None:
            gateway.tracer.sender.close()
        return idle

    return gateway, drain


def _warm(service: Service, gateway: WsgiGateway) -> None:
    with service.timeline.stage("app"):
        gateway.app()
    if service.engine is not None:
        from ..openai import calls  # noqa: F401  most requests need it next
    if service.function is not None:
        service.function.load()
    # What is imported stays. A full collection that looked at all of it would hold up every stream and probe.
    gc.freeze()
    if service.engine is None and service.ready:
        service.timeline.mark("ready")


def _block_sigterm_during_forks() -> None:
    """Block SIGTERM during a fork: gunicorn's handlers would lose it, until the child has handlers of its own."""

    def default() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
        after_in_child=default,
    )
