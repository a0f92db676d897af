"""`medusa cluster start`: run this machine's node."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_runtime.errors import ConfigError, MissingPackageError

from ..flags import add_log_format, log_settings

if TYPE_CHECKING:
    from medusa_cluster.node.settings import NodeServerSettings, TlsFiles

logger = logging.getLogger(__name__)

INSTALL = 'pip install "medusa-runtime[cluster]"'
_NEEDED = ("ray", "aiohttp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--head", action="store_true", help="start a cluster; this node is its head")
    role.add_argument("--address", metavar="HOST[:PORT]", help="join the cluster whose head's node server is there")
    parser.add_argument("--name", metavar="NAME", help="the node's name in the cluster; default: the host's name")
    parser.add_argument(
        "--dir", type=Path, metavar="PATH", help="folder for sockets, state and logs; one for each node"
    )
    parser.add_argument("--host", metavar="ADDRESS", help="address that other nodes reach; default: found")
    parser.add_argument("--data-port", type=int, metavar="N", help="port of the node server (default: 8114)")
    parser.add_argument(
        "--ray-port", type=int, metavar="N", help="the first of 40 ports for Ray (default: 6379, and up to 6418)"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the cluster's token; default: token in --dir")
    scaler = parser.add_mutually_exclusive_group()
    scaler.add_argument(
        "--autoscaling-config", type=Path, metavar="FILE", help="head: run Ray's autoscaler with this configuration"
    )
    scaler.add_argument("--external-autoscaler", action="store_true", help="head: it runs elsewhere, as with KubeRay")
    parser.add_argument(
        "--least-nodes", type=int, metavar="N", help="head: nodes that an autoscaler may not end (default: 1)"
    )
    link = parser.add_mutually_exclusive_group()
    link.add_argument("--link", metavar="RATE", help="the network's, such as 400mbit or 50MB; default: found")
    link.add_argument("--link-bytes-per-s", type=float, metavar="N", help="the same as bytes of payload")
    parser.add_argument(
        "--leaf", default="", metavar="NAME", help="the switch this node hangs on, if there are several"
    )
    parser.add_argument(
        "--device-kind", default="", metavar="NAME", help="what this node computes on, such as h100, for deployments"
    )
    parser.add_argument(
        "--device-link", metavar="RATE", help="from the host's memory to each GPU, such as 50GB; default: its driver's"
    )
    parser.add_argument("--memory-budget", metavar="SIZE", help="memory for all models, e.g. 16GB; as for medusa node")
    parser.add_argument("--prewarm", metavar="LIST", help="idle engine processes to keep (default: torch=1)")
    add_log_format(parser)
    add_tls(parser, "this node's certificate", "who signed all nodes' own", "encrypt all traffic; every node needs it")


def run(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    require_extra()
    from medusa_cluster.node.processes.keeper import keep
    from medusa_cluster.node.settings import check_folder
    from medusa_runtime.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    check_folder(settings.folder)
    kept = keep()
    if isinstance(kept, int):
        return kept
    from medusa_cluster.node.server import serve

    say = logger.info if settings.log_format == "json" else partial(print, flush=True)
    return serve(settings, say, kept)


def add_tls(parser: argparse.ArgumentParser, certificate: str, authority: str, derived: str) -> None:
    """Add the flags that ``tls_files`` reads. The texts say whose they are, and what ``--tls`` is for."""
    parser.add_argument("--tls", action="store_true", help=f"{derived}; certificates come from the token")
    for name, text in (("cert", certificate), ("key", "its key"), ("ca", authority)):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help=f"{text}; PEM")


def require_extra(packages: Sequence[str] = _NEEDED) -> None:
    """Raise MissingPackageError if one of these packages of the extra `cluster` is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(f"medusa cluster needs {package}: {INSTALL}")


def _settings(arguments: argparse.Namespace) -> NodeServerSettings:
    from medusa_cluster.node import settings as node
    from medusa_cluster.node.gpus import visible_gpus

    folder = (arguments.dir or node.default_folder()).absolute()
    head = None if arguments.head else head_address(arguments.address)
    level, log_format = log_settings(arguments, os.environ)
    tls = tls_files(arguments)
    if arguments.tls:
        require_extra(["cryptography"])
        tls = node.TlsFiles.below(folder)
    host = _host(arguments.host or _reached_from(None if head is None else head[0]))
    return node.NodeServerSettings(
        name=node.check_name(arguments.name or socket.gethostname()),
        folder=folder,
        host=host,
        token_file=(arguments.token_file or folder / "token").absolute(),
        head_url=None if head is None else f"{'http' if tls is None else 'https'}://{bracketed(head[0])}:{head[1]}",
        data_port=_port("--data-port", arguments.data_port, node.DATA_PORT, 1),
        ray_port=_port("--ray-port", arguments.ray_port, node.RAY_PORT, node.RAY_PORTS),
        link_bytes_per_s=_link(arguments, host),
        autoscaling_config=_autoscaling_config(arguments),
        least_nodes=_least_nodes(arguments),
        leaf=arguments.leaf,
        gpus=visible_gpus(os.environ),
        gpu_bytes_per_s=_device_link(arguments.device_link),
        device_kind=node.check_device_kind(arguments.device_kind),
        memory_budget=arguments.memory_budget,
        prewarm=arguments.prewarm or "torch=1",
        tls=tls,
        makes_certificates=arguments.tls,
        log_level=level,
        log_format=log_format,
    )


def head_address(text: str) -> tuple[str, int]:
    """Return the host and port of ``HOST[:PORT]``. Raises ConfigError with the accepted form."""
    from medusa_cluster.node.settings import DATA_PORT

    host, colon, port = text.rpartition(":") if text.count(":") == 1 or "]:" in text else (text, "", "")
    host = host.strip("[]")
    if not host or "/" in host or (colon and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536)):
        raise ConfigError(f"--address: expected HOST or HOST:PORT of the head's node server, found {text!r}")
    return host, int(port) if colon else DATA_PORT


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _port(flag: str, given: int | None, default: int, count: int) -> int:
    port = default if given is None else given
    if not 1 <= port <= 65536 - count:
        raise ConfigError(f"{flag}: expected a port from 1 to {65536 - count}, found {port}")
    return port


def tls_files(arguments: argparse.Namespace) -> TlsFiles | None:
    """Return the certificates that were given. Raises ConfigError, also if ``--tls`` is to make them."""
    from medusa_cluster.node.settings import TlsFiles

    given = (arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    if not any(given):
        return None
    if arguments.tls:
        raise ConfigError("expected --tls, which makes certificates, or --tls-cert, --tls-key and --tls-ca, found both")
    if not all(given):
        raise ConfigError("expected --tls-cert, --tls-key and --tls-ca together; --tls alone makes certificates")
    for path in given:
        if not path.is_file():
            raise ConfigError(f"expected a PEM file, found none at {path}")
    return TlsFiles(*(path.absolute() for path in given))


def _host(host: str) -> str:
    """Return the node's address. Raises ConfigError for one that Ray replaces, since then nothing finds its actor."""
    if host in ("localhost", "127.0.0.1", "::1"):
        raise ConfigError(
            f"--host: expected an address that other nodes reach, found {host}, in whose place Ray takes another; "
            "127.0.0.2 stays on this machine"
        )
    return host


def _reached_from(head: str | None) -> str:
    """Return this machine's address in the network of the head, or on the route to the internet. Nothing is sent."""
    target = head or "192.0.2.1"
    try:
        family, *_, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"this machine's address was not found ({error}); give it as --host") from None


def _autoscaling_config(arguments: argparse.Namespace) -> Path | None:
    path: Path | None = arguments.autoscaling_config
    if path is not None and not arguments.head:
        raise ConfigError("--autoscaling-config: expected it with --head alone")
    if path is not None and not path.is_file():
        raise ConfigError(f"--autoscaling-config: expected a file, found none at {path}")
    return None if path is None else path.absolute()


def _least_nodes(arguments: argparse.Namespace) -> int | None:
    """Return how many nodes an autoscaler always keeps; None without one. Raises ConfigError."""
    scaled = arguments.autoscaling_config is not None or arguments.external_autoscaler
    least: int | None = arguments.least_nodes
    if least is not None and not scaled:
        raise ConfigError("--least-nodes: expected it with --autoscaling-config or --external-autoscaler")
    if least is not None and least < 1:
        raise ConfigError(f"--least-nodes: expected 1 or more, found {least}")
    return (least or 1) if scaled else None


def _link(arguments: argparse.Namespace, host: str) -> float:
    from medusa_cluster.lab.link_speed import LinkSpeed

    if arguments.link_bytes_per_s is not None:
        if not arguments.link_bytes_per_s > 0:
            raise ConfigError(f"--link-bytes-per-s: expected a number above 0, found {arguments.link_bytes_per_s}")
        return float(arguments.link_bytes_per_s)
    if arguments.link is not None:
        return LinkSpeed.parse(arguments.link).bytes_per_s
    return _device_rate(host) or 1.25e9


def _device_link(given: str | None) -> float | None:
    from medusa_cluster.lab.link_speed import LinkSpeed

    return None if given is None else LinkSpeed.parse(given, "--device-link").bytes_per_s


def _device_rate(host: str) -> float | None:
    """Return the speed that the kernel reports for the device with this address, in bytes a second, or None."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == host:
                    return max(float(Path(f"/sys/class/net/{name}/speed").read_text()), 0) * 1e6 / 8 or None
            except (OSError, ValueError):
                continue
    return None
