"""Stopped processes are killed, unless it is the watch that did not run."""

from __future__ import annotations

import signal
import subprocess
import time

from medusa_cluster.node.processes.stopped import StoppedProcesses
from process_tree import stopped
from waiting import until


def test_a_process_that_was_stopped_together_with_the_watch_is_not_killed() -> None:
    """Who stops all processes of a node stops some before the watch, and lets the watch go on before them."""
    with subprocess.Popen(["sleep", "600"]) as process:
        watch = StoppedProcesses(lambda: [process.pid])
        process.send_signal(signal.SIGSTOP)
        until(lambda: stopped(process.pid))
        watch.check()
        time.sleep(2)  # as if this process had been stopped
        watch.check()
        process.send_signal(signal.SIGCONT)
        until(lambda: not stopped(process.pid))
        watch.check()
        assert process.poll() is None
        process.send_signal(signal.SIGSTOP)

        def is_killed() -> bool:
            watch.check()
            return process.poll() == -signal.SIGKILL

        until(is_killed)
