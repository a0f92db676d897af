"""gunicorn's settings: one threaded worker, on connections that the acceptor hands to it."""

from __future__ import annotations

import logging
import math
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from medusa_runtime.bounded_template.renderer import template_renderer
from medusa_runtime.container_limits import OutOfMemory, memory_limit_bytes
from medusa_runtime.process import die_with_parent, name_process
from medusa_runtime.process_limits import LEAST_FILES, most_files
from medusa_runtime.registry import NO_ENGINE

from .probe_acceptor import KEEPALIVE_S

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.liveness import Heartbeats

    from .probe_acceptor import ProbeAcceptor

_SPARE_THREADS = 32  # for probes, metrics and requests that are about to be refused
_IDLE_CONNECTIONS = 2048
_LARGEST_BODIES = 8  # how many of the largest bodies have memory at the same time, unless body_memory_mb is set
_PART_OF_LIMIT = 0.25  # of the memory that a container may use
STOP_GRACE_S = 1  # for responses that have been made, and idle connections


def worker_folder(memory: str = "/dev/shm") -> str:
    """Return the folder of gunicorn's (unlinked) heartbeat file: in memory, or else one for temporary files."""
    places = (memory, os.environ.get("TMPDIR"), "/tmp", "/var/tmp")
    return next((place for place in places if place and os.access(place, os.W_OK)), "/tmp")


def body_memory_mb(settings: Settings) -> int:
    """Return how many MB all request bodies may take together: at least enough for one of the largest."""
    return max(settings.body_memory_mb or _default_body_memory_mb(settings), settings.max_body_mb + 4)


def _default_body_memory_mb(settings: Settings) -> int:
    several = _LARGEST_BODIES * settings.max_body_mb
    limit = memory_limit_bytes()
    return several if limit is None else min(several, int(limit * _PART_OF_LIMIT) // 10**6)


def threads(settings: Settings) -> int:
    return settings.max_concurrency + settings.max_waiting + _SPARE_THREADS


def options(
    acceptor: ProbeAcceptor, settings: Settings, heartbeats: Heartbeats, out_of_memory: OutOfMemory
) -> dict[str, Any]:
    """Return gunicorn's settings: no timeout (a model may take long), no control socket, no access log."""
    return {
        "workers": 1,
        "worker_class": "medusa_handler.server.gunicorn_worker.Worker",
        "threads": threads(settings),
        # With more, the process could reach its limit of open files, at which gunicorn's worker would end.
        "worker_connections": min(threads(settings) + _IDLE_CONNECTIONS, most_files() - LEAST_FILES // 2),
        "worker_tmp_dir": worker_folder(),
        "timeout": 0,
        "graceful_timeout": math.ceil(settings.drain_s) + 2 * STOP_GRACE_S,
        "keepalive": int(KEEPALIVE_S),
        "limit_request_line": 8190,
        "limit_request_fields": 100,
        "limit_request_field_size": 8190,
        # A proxy beside us (queue-proxy) passes clients' headers on, and none of them may move our routes.
        "forwarded_allow_ips": "",
        "forwarder_headers": "",
        # By default, those of the process that imported gunicorn, which may have been another (medusa_snapshot).
        "user": os.geteuid(),
        "group": os.getegid(),
        "control_socket_disable": True,
        "loglevel": "warning",
        "accesslog": None,
        "errorlog": None,  # what it reports is in our log
        "proc_name": "function",
        "on_starting": partial(_on_starting, acceptor, out_of_memory),
        "pre_fork": lambda arbiter, _worker: arbiter.app.starting(),
        "post_fork": partial(_in_worker, acceptor, settings, heartbeats),
    }


def _on_starting(acceptor: ProbeAcceptor, out_of_memory: OutOfMemory, arbiter: Any) -> None:
    arbiter.LISTENERS = [acceptor.handoff]  # gunicorn makes its own only where there are none
    arbiter.log.error_log.propagate = True
    arbiter.log.error_log.addFilter(_KilledWorker(out_of_memory))


class _KilledWorker(logging.Filter):
    """Rewords what gunicorn logs of a worker that a signal ended, and adds whether memory ran out."""

    def __init__(self, out_of_memory: OutOfMemory) -> None:
        super().__init__()
        self._out_of_memory = out_of_memory

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Worker (pid:%s) was sent %s!") and isinstance(record.args, tuple):
            name = record.args[1]
            how = self._out_of_memory.how(-signal.SIGKILL) if name == "SIGKILL" else f"killed by {name}"
            record.msg, record.args = "the worker ended (%s), and with it the requests that were running", (how,)
            record.levelno, record.levelname = logging.ERROR, "ERROR"
        return True


def _in_worker(acceptor: ProbeAcceptor, settings: Settings, heartbeats: Heartbeats, arbiter: Any, _worker: Any) -> None:
    heartbeats.enter("worker")
    acceptor.close_in_worker()
    die_with_parent(arbiter.pid)
    name_process("worker")
    if settings.engine != NO_ENGINE:
        template_renderer().start(fork=True)  # later, this process has threads
