"""The agent's zygote for one engine kind: it imports what the engine needs, then forks idle processes on request."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ...config import Settings
from ...container_limits import OutOfMemory
from ...device.choice import choose
from ...errors import MedusaError
from ...process import ReportPipe, end_first, fork
from ...timeline import Timeline
from ...zygote import load_engine_class
from ..child import close_others
from ..messages import channel_pair, receive, send
from .warm_engine import run_idle

logger = logging.getLogger(__name__)


def run_zygote(
    engine: Settings, gpu_context: bool, reports: ReportPipe, channel: socket.socket, timeline: Timeline
) -> int:
    """Fork idle processes until the agent closes the channel. If the engine cannot be imported, report that to it."""
    kind = engine.engine
    close_others(channel.fileno(), reports.write_fd, timeline.fd)
    end_first()
    out_of_memory = OutOfMemory()
    out_of_memory.look()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(kind, out_of_memory))
    settings = replace(engine, device=choose("auto", os.environ))
    gc.disable()
    try:
        engine_class = load_engine_class(settings)
    except (ImportError, MedusaError) as error:
        send(channel, "failed", {"message": f"the {kind} engine cannot be imported: {error}"})
        return 1
    gc.freeze()
    while (message := receive(channel)) is not None:
        assert message.kind == "fork", message
        theirs, mine = channel_pair()
        body = partial(run_idle, engine_class, settings, gpu_context, mine, reports)
        pid = fork("engine", body, timeline=timeline, reports=reports)
        mine.close()
        # With this descriptor, the agent can signal the process, and never another one that has got its number.
        pidfd = os.pidfd_open(pid)
        send(channel, "forked", {"pid": pid}, [theirs.fileno(), pidfd])
        os.close(pidfd)
        theirs.close()
    return 0


def _reap(kind: str, out_of_memory: OutOfMemory) -> None:
    """Reap what has ended, and log what a signal has ended. A function that has taken it only sees that it is gone."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1])
            if status < 0:
                logger.warning("%s engine process %d ended (%s)", kind, ended[0], out_of_memory.how(status))
