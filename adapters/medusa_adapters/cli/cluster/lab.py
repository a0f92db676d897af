"""`medusa cluster lab`: a cluster of several nodes on this one machine."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import ConfigError

from .connection import DIR_VARIABLE

if TYPE_CHECKING:
    from medusa_cluster.lab.laboratory import Laboratory

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LOOK_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make nodes on this machine, each with a network, processes and a link of its own, start a cluster on them, "
        "and serve models by it. All of it is gone when the command ends, however it ends. Needs root."
    )
    parser.add_argument("--nodes", type=int, default=4, metavar="N", help="how many; the first is the head")
    parser.add_argument(
        "--link", metavar="RATE", help="payload that each node can send, and receive, e.g. 400mbit or 50MB a second"
    )
    parser.add_argument("--cpus", type=float, metavar="N", help="cores of each node, where control groups allow it")
    parser.add_argument(
        "--model", action="append", default=[], metavar="[NAME=]FOLDER", help="serve this checkpoint; may be repeated"
    )
    parser.add_argument("--engine", default="torch", help="the engine of the models")
    parser.add_argument("--min", type=int, default=0, metavar="N", help="instances that each model always has")
    parser.add_argument("--max", type=int, metavar="N", help="most instances of each model (default: one on each node)")
    parser.add_argument("--gateway-port", type=int, default=8080, metavar="N", help="of 127.0.0.1, for the gateway")
    parser.add_argument("--prewarm", metavar="LIST", help="idle engine processes of each node, e.g. torch=1")
    parser.add_argument("--memory-budget", metavar="SIZE", help="memory of each node for models, e.g. 1GB")
    parser.add_argument("--bare", action="store_true", help="make nodes and the origin alone, without a cluster")
    parser.add_argument(
        "program", nargs="*", metavar="COMMAND", help="after --: run this on the first node, and end with its status"
    )


def run(arguments: argparse.Namespace) -> int:
    models = _models(arguments.model)
    if not 1 <= arguments.gateway_port <= 65535:
        raise ConfigError(f"--gateway-port: expected a port from 1 to 65535, found {arguments.gateway_port}")
    if not arguments.bare:
        from .start import require_extra

        require_extra()
    from medusa_cluster.lab.laboratory import Laboratory

    lab = Laboratory(arguments.nodes, arguments.link, cpus=arguments.cpus, origin=models)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, _stop)
    try:
        with lab:
            _describe(lab, models)
            if arguments.bare:
                return _program(lab, arguments.program) if arguments.program else _wait({})
            return _cluster(lab, arguments)
    except KeyboardInterrupt:
        return 130


def _cluster(lab: Laboratory, arguments: argparse.Namespace) -> int:
    from medusa_cluster.lab.cluster import LabCluster

    flags = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("prewarm", "memory-budget")]
    cluster = LabCluster(lab, [flag for flag in flags if not flag.endswith("=None")])
    if gpus := cluster.describe_gpus():
        _log(gpus)
    try:
        _log("starting the head …")
        cluster.start_head()
        inside = cluster.start_gateway(arguments.gateway_port)
        outside = lab.forward(arguments.gateway_port, "switch", arguments.gateway_port)
        for name in lab.served:
            most = len(lab.nodes) if arguments.max is None else arguments.max
            cluster.deploy(name, engine=arguments.engine, min=arguments.min, max=most)
            _log(f"model {name}: {lab.origin_url}/{name}")
        _log(f"gateway: {outside} (for nodes {inside}); requests are answered from now on, while other nodes join")
        folder = str(lab.node_folder(lab.nodes[0]))
        _log(f"commands: export {DIR_VARIABLE}={folder} && medusa cluster status")
        cluster.start_others(lambda node: _log(f"  {node} has joined"))
        if arguments.program:
            return _program(lab, arguments.program, env=os.environ | {DIR_VARIABLE: folder})
        return _wait(cluster.servers)
    finally:
        # Only the first Ctrl-C counts: a second one would interrupt the laboratory's orderly end.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        cluster.stop()


def _describe(lab: Laboratory, models: dict[str, Path]) -> None:
    link = f"links of {lab.link} each way" if lab.link else "links without a limit"
    _log(f"{len(lab.nodes)} nodes, {link}; {lab.quotas}")
    for node in lab.nodes:
        _log(f"  {node}  {lab.address(node)}  a shell in it: sudo nsenter -at {lab.pid(node)}")
    if models:
        _log(f"  origin  {lab.origin_url}  {', '.join(models)}")


def _program(lab: Laboratory, command: list[str], **options: Any) -> int:
    status: int = lab.run(lab.nodes[0], command, **options).returncode
    return status if status >= 0 else 128 - status


def _wait(servers: dict[str, subprocess.Popen[bytes]]) -> int:
    """Wait until Ctrl-C, and name node servers that end meanwhile."""
    _log("Ctrl-C ends it")
    ended: set[str] = set()
    while True:
        time.sleep(_LOOK_S)
        for node, server in servers.items():
            if node not in ended and server.poll() is not None:
                ended.add(node)
                _log(f"{node} has ended with {server.returncode}")


def _models(given: list[str]) -> dict[str, Path]:
    """Return names and folders of the checkpoints. Raises ConfigError for one that is not a checkpoint's folder."""
    found: dict[str, Path] = {}
    for text in given:
        name, sign, place = text.partition("=") if "://" not in text else ("", "", text)
        folder = Path(place if sign else text)
        name = name if sign else folder.resolve().name
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"--model: expected the folder of a checkpoint, found {text!r}; the nodes do not reach the outside, so "
                "fetch it first: medusa fetch URL --to FOLDER"
            )
        if not _NAME.fullmatch(name) or name in found:
            raise ConfigError(f"--model: expected a name of its own with letters, digits and . _ -, found {name!r}")
        found[name] = folder.resolve()
    return found


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _log(line: str) -> None:
    with suppress(BrokenPipeError):
        print(line, file=sys.stderr, flush=True)
