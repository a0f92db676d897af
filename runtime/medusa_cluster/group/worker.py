"""One worker of a group as a process of its own: ``python -m medusa_cluster.group.worker``.

It fetches the model into a region, its own layers first, and serves the engine protocol on a Unix socket. Rank 0 serves
for the whole group, other ranks once they have become instances. ``medusa serve --engine group`` does the same, with
everything else that an instance has. Without ``--group``, the worker is an instance by itself, for comparison. All
other settings are ``MEDUSA_*`` variables, as for ``medusa serve``.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medusa_runtime.config import Settings, from_env
from medusa_runtime.container_limits import signal_name
from medusa_runtime.device.choice import choose
from medusa_runtime.device.context import DeviceContext
from medusa_runtime.errors import EngineError, MedusaError, from_code
from medusa_runtime.imports.gc_paused import gc_paused
from medusa_runtime.process import ReportPipe, die_with_parent, fork, share_cores
from medusa_runtime.region.reader import Region
from medusa_runtime.registry import engine_kind, imported
from medusa_runtime.timeline import Timeline, process_start_ns

from ..deployment import GROUP_ENGINES

logger = logging.getLogger(__name__)

_POLL_S = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one worker until SIGTERM, or until its group releases it. Return the exit status, 2 for an error."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if options.die_with_parent:
        die_with_parent(os.getppid())
    whole = options.group is None and options.engine == "torch"
    try:
        settings = from_env(
            os.environ,
            engine="torch"
            if whole
            else GROUP_ENGINES[options.engine],  # vLLM's without --group is a whole instance, too
            model=options.model,
            layers=options.layers,
            group=options.group,
        )
        settings = replace(settings, device=choose(settings.device, os.environ))
        if options.warm:
            _wait_warm(settings)
        return run(settings, options.socket, options.timeline, warm=options.warm)
    except MedusaError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 2


def _wait_warm(settings: Settings) -> None:
    """Import what the engine needs, like a node agent's idle processes, and wait for a line on standard input.

    The group's file may be written until then.
    """
    with gc_paused():
        imported(engine_kind(GROUP_ENGINES.get(settings.engine, settings.engine)).preimport)(settings)
        gc.freeze()  # else each collection visits all modules, which copies their pages in forks
    print("warm", flush=True)
    sys.stdin.readline()


def run(settings: Settings, path: str, timeline_path: str | None = None, *, warm: bool = False) -> int:
    """Fork the prefetcher and the engine, and wait until the engine ends. Raises the error that ended either of them.

    ``path`` is the engine's socket. With ``warm``, the timeline begins now, and not with the process.
    """
    share_cores()
    timeline = Timeline.create("worker")
    timeline.record("exec", time.monotonic_ns() if warm else process_start_ns(), time.monotonic_ns())
    reports = ReportPipe()
    region = Region.create()
    listener = _listen(path)

    def prefetcher(timeline: Timeline) -> int:
        from medusa_runtime.instance.engine_fetch import prefetch_for_engine

        prefetch_for_engine(region, settings, timeline)
        return 0

    def engine(timeline: Timeline) -> int:
        on_gpu = settings.device == "cuda" and engine_kind(settings.engine).owns_gpu_context
        context = DeviceContext(timeline=timeline) if on_gpu else None  # it is made beside the imports
        with timeline.stage("import"), gc_paused():
            from medusa_runtime.zygote import load_engine_class, run_engine

            make = load_engine_class(settings, region)
            gc.freeze()
        if context is not None:
            context.wait()
        return run_engine(lambda: make(region, settings, timeline), listener, timeline=timeline, reports=reports)

    fetching = fork("prefetcher", prefetcher, timeline=timeline, reports=reports)
    serving = fork("engine", engine, timeline=timeline, reports=reports)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.kill(serving, signal.SIGTERM))
    try:
        return _supervise(fetching, serving, reports)
    finally:
        Path(path).unlink(missing_ok=True)
        if timeline_path is not None:
            Path(timeline_path).write_bytes(os.pread(timeline.fd, os.fstat(timeline.fd).st_size, 0))


def _supervise(fetching: int, serving: int, reports: ReportPipe) -> int:
    """Wait until the engine ends, and return its exit status."""
    poll = select.poll()
    poll.register(reports.read_fd, select.POLLIN)
    left = {fetching, serving}
    try:
        while True:
            poll.poll(_POLL_S * 1e3)
            ended: dict[int, int] = {}
            for pid in tuple(left):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[pid] = os.waitstatus_to_exitcode(status)
                    left.discard(pid)
            for report in reports.read():
                raise from_code(report.code, report.message)
            if serving in ended:
                if ended[serving] < 0:
                    raise EngineError(f"the engine process was killed by {signal_name(-ended[serving])}")
                return ended[serving]
            if ended.get(fetching):
                raise EngineError(f"the prefetcher ended early (status {ended[fetching]})")
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
    except OSError as error:
        raise EngineError(f"--socket: {path}: {error.strerror or error}") from None
    os.chmod(path, 0o600)
    listener.listen(128)
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m medusa_cluster.group.worker", description=__doc__)
    parser.add_argument("--model", required=True, help="the checkpoint, as for medusa serve")
    parser.add_argument("--engine", choices=GROUP_ENGINES, default="torch", help="whose workers; torch")
    parser.add_argument("--group", help="the file that describes the group (see GroupPlan)")
    parser.add_argument("--layers", metavar="START:STOP", help="the layers that this worker of a pipeline holds first")
    parser.add_argument("--socket", required=True, metavar="PATH", help="the Unix socket to serve the engine on")
    parser.add_argument("--timeline", metavar="PATH", help="write the timeline to this file at the end")
    parser.add_argument("--warm", action="store_true", help="import first, print a line, and start at one on stdin")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process ends that started this")
    return parser


if __name__ == "__main__":
    sys.exit(main())
