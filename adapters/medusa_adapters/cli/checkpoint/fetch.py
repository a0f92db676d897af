"""`medusa fetch`: a checkpoint into a folder, or into a region, to see how fast its store is."""

from __future__ import annotations

import argparse
import os
import select
import sys
import threading
import time
from pathlib import Path

from medusa_runtime.config import NODE_SOCKET, Settings, from_env
from medusa_runtime.errors import ConfigError, NodeError, StorageError, from_code

from ..flags import add_model, model_argument
from ..leftovers import Leftovers
from ..progress import ProgressLine, size

_LOOK_EVERY_S = 0.1
_CONNECTIONS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--to", type=Path, metavar="DIR", help="write its files there; without it, only into memory")
    parser.add_argument("--node", action="store_true", help="into the node agent's memory, for all functions here")
    parser.add_argument("--pin", action="store_true", help="with --node: never evict it")
    parser.add_argument("--fresh", action="store_true", help="with --node: even if it is there, for it has changed")
    parser.add_argument("--node-socket", metavar="SOCKET", help="the node agent's socket [MEDUSA_NODE_SOCKET]")
    parser.add_argument("--connections", metavar="N", help="connections to the store [MEDUSA_CONNECTIONS]")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    settings = from_env(
        os.environ,
        model=model_argument(arguments),
        connections=arguments.connections,
        node_socket=arguments.node_socket,
    )
    if settings.model is None:
        raise ConfigError("expected a checkpoint: medusa fetch URL, or --model URL")
    began = time.monotonic()
    if arguments.node:
        fetched = _into_node(settings, pin=arguments.pin, fresh=arguments.fresh)
        place = "into the node agent's memory"
    elif arguments.to is not None:
        fetched = _into_folder(settings.model, arguments.to, settings.connections or _CONNECTIONS)
        place = f"into {arguments.to}"
    else:
        fetched = _into_memory(settings)
        place = "into memory"
    took_s = time.monotonic() - began
    print(f"fetched {size(fetched)} in {took_s:.2f} s, {fetched / 1e6 / max(took_s, 1e-6):,.0f} MB/s, {place}")
    return 0


def can_end_anywhere(arguments: argparse.Namespace) -> bool:
    """Return whether Ctrl-C may end this process at once: not in a copy to a folder, where it removes its files."""
    return arguments.to is None


def leftovers(arguments: argparse.Namespace) -> list[Leftovers]:
    if arguments.to is None:
        return []
    from .download import PART

    return [Leftovers(arguments.to, f"*{PART}")]


def _check(arguments: argparse.Namespace) -> None:
    if arguments.node and (arguments.to is not None or arguments.connections is not None):
        raise ConfigError("--node: expected neither --to nor --connections; the agent fetches, into its own memory")
    if not arguments.node and (arguments.pin or arguments.fresh or arguments.node_socket is not None):
        raise ConfigError("--pin, --fresh and --node-socket: expected --node beside them")


def _into_node(settings: Settings, *, pin: bool, fresh: bool) -> int:
    """Have the agent fetch the weights, and return their bytes. Raises NodeError, and the store's own errors."""
    from medusa_runtime.node.client import NodeClient

    assert settings.model is not None
    client = NodeClient(settings.node_socket or NODE_SOCKET, settings.node_user)
    line = _line()
    try:
        region = client.region(settings.model, pin=pin, fresh=fresh, background=True)
        while (progress := region.progress()).state == "fetching":
            line.show(progress)
            if select.select([client], [], [], _LOOK_EVERY_S)[0] and (reason := client.read_loss()) is not None:
                raise NodeError(reason or "the node agent ended while it was fetching")
        line.end()
        if progress.error is not None:
            raise NodeError(progress.error)
        region.close()
        return progress.total_bytes
    finally:
        line.end()
        client.close()


def _into_memory(settings: Settings) -> int:
    """Fetch the weights into a region, as `medusa serve` does with its own prefetcher, and return their bytes."""
    from medusa_runtime.process import ReportPipe, fork
    from medusa_runtime.region.reader import Region
    from medusa_runtime.timeline import Timeline

    region, reports, timeline = Region.create(), ReportPipe(), Timeline.create("fetch")

    def prefetch(timeline: Timeline) -> int:
        from medusa_runtime.fetch.prefetcher import prefetch

        assert settings.model is not None
        prefetch(region, settings.model, settings=settings, timeline=timeline)
        return 0

    child = fork("prefetcher", prefetch, timeline=timeline, reports=reports)
    line, ending = _line(), os.pidfd_open(child)
    try:
        while not select.select([ending], [], [], _LOOK_EVERY_S)[0]:
            line.show(region.progress())
        _, status = os.waitpid(child, 0)
        child = 0
        line.end()
        for report in reports.read():
            raise from_code(report.code, report.message)
        if status:
            raise StorageError(f"the prefetcher ended with status {os.waitstatus_to_exitcode(status)}")
        return region.progress().total_bytes
    finally:
        line.end()
        if child:
            os.kill(child, 9)
            os.waitpid(child, 0)
        region.close()
        reports.close()
        timeline.close()
        os.close(ending)


def _into_folder(url: str, folder: Path, connections: int) -> int:
    from medusa_runtime.checkpoint.reader import open_checkpoint

    from .download import Download

    checkpoint = open_checkpoint(url)
    try:
        if checkpoint.store.local_path("config.json") == (folder / "config.json").resolve():
            raise ConfigError(f"--to={str(folder)!r}: expected another folder than the checkpoint's own")
        download = Download(checkpoint, folder, connections)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                download.run()
            except BaseException as error:  # noqa: BLE001 (raised again by the thread that shows progress)
                failures.append(error)

        thread = threading.Thread(target=work, name="download", daemon=True)
        thread.start()
        line = _line()
        while thread.is_alive():
            line.show(download.progress())
            thread.join(_LOOK_EVERY_S)
        line.end()
        for failure in failures:
            if isinstance(failure, OSError):
                raise ConfigError(f"--to={str(folder)!r} cannot be written: {failure.strerror}") from failure
            raise failure
        return download.total_bytes
    finally:
        checkpoint.store.close()


def _line() -> ProgressLine:
    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    return ProgressLine(write, moving=sys.stderr.isatty())
