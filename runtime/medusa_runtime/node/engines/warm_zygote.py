"""The agent's zygote of one engine kind: imports what the engine needs, then forks idle processes on request."""

from __future__ import annotations

import gc
import os
import signal
import socket
from dataclasses import replace
from functools import partial

from ...config import Settings
from ...device.choice import choose
from ...errors import MedusaError
from ...process import ReportPipe, end_first, fork
from ...timeline import Timeline
from ...zygote import load_engine_class
from ..child import close_others
from ..messages import pair, receive, send
from .warm_engine import run_idle


def run_zygote(
    engine: Settings, gpu_context: bool, reports: ReportPipe, channel: socket.socket, timeline: Timeline
) -> int:
    """Fork idle processes of ``engine`` until the agent closes the channel; report to it what cannot be imported."""
    kind = engine.engine
    close_others(channel.fileno(), reports.write_fd, timeline.fd)
    end_first()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
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
        theirs, mine = pair()
        body = partial(run_idle, engine_class, settings, gpu_context, mine, reports)
        pid = fork("engine", body, timeline=timeline, reports=reports)
        mine.close()
        # The agent can signal the process by this descriptor and never another one that has taken over its number.
        pidfd = os.pidfd_open(pid)
        send(channel, "forked", {"pid": pid}, [theirs.fileno(), pidfd])
        os.close(pidfd)
        theirs.close()
    return 0
