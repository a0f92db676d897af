"""`medusa cluster gateway`: the entrance of a cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from medusa_runtime.config import positive, seconds
from medusa_runtime.errors import ConfigError, MissingPackageError
from medusa_runtime.storage.peer_access import PeerAccess, read_token

from ..flags import log_level
from ..serve import configure_logging

_ADDRESS, _TOKEN_FILE, _CLIENT_TOKEN_FILE = "MEDUSA_CLUSTER", "MEDUSA_CLUSTER_TOKEN_FILE", "MEDUSA_TOKEN_FILE"
_LOCAL = "127.0.0.1:8114"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_number(0, 65535), default=8080, help="port to bind; 0 takes a free one")
    parser.add_argument("--host", default="0.0.0.0", help="address to bind")
    parser.add_argument(
        "--address",
        action="append",
        metavar="HOST:PORT",
        help=f"a node server of the cluster; may be given several times [{_ADDRESS}, with commas; default: {_LOCAL}]",
    )
    parser.add_argument("--token-file", metavar="FILE", help=f"the cluster's token [{_TOKEN_FILE}]")
    parser.add_argument("--tls-ca", metavar="FILE", help="the cluster's CA, where its nodes speak TLS")
    parser.add_argument("--tls-cert", metavar="FILE", help="this gateway's certificate, signed by it")
    parser.add_argument("--tls-key", metavar="FILE", help="the certificate's key")
    parser.add_argument(
        "--client-token-file",
        metavar="FILE",
        help=f"secret that requests must bear; default: none [{_CLIENT_TOKEN_FILE}]",
    )
    for name, parse, default, text in (
        ("max-waiting", positive, 2048, "requests that may wait; more get 429"),
        ("max-body-mb", positive, 32, "largest request body"),
        ("hold-s", seconds, 600.0, "how long a request waits for an instance"),
        ("drain-s", seconds, 30.0, "how long running requests may go on after SIGTERM"),
        ("write-timeout-s", seconds, 60.0, "how long a client may take nothing of its answer"),
    ):
        parser.add_argument(f"--{name}", type=_parsed(parse), default=default, metavar="N", help=text)
    parser.add_argument("--name", default="", help="the gateway's name in the status; default: host and process id")


def run(arguments: argparse.Namespace) -> int:
    try:
        from medusa_cluster.gateway.gateway import GatewayOptions
        from medusa_cluster.gateway.process import run as serve
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise MissingPackageError(
            'a gateway needs aiohttp, which is not installed: pip install "medusa-runtime[cluster]"'
        ) from None
    addresses = arguments.address or os.environ.get(_ADDRESS, _LOCAL).split(",")
    client_token_file = arguments.client_token_file or os.environ.get(_CLIENT_TOKEN_FILE)
    configure_logging(log_level([], os.environ) or "info")
    options = GatewayOptions(
        addresses=tuple(address.strip() for address in addresses if address.strip()),
        host=arguments.host,
        port=arguments.port,
        access=_access(arguments),
        client_token=read_token(client_token_file) if client_token_file else None,
        max_waiting=arguments.max_waiting,
        hold_s=arguments.hold_s,
        drain_s=arguments.drain_s,
        max_body_mb=arguments.max_body_mb,
        write_timeout_s=arguments.write_timeout_s,
        name=arguments.name,
    )
    return serve(options, lambda url: print(f"listening on {url}", flush=True))


def _access(arguments: argparse.Namespace) -> PeerAccess:
    file = arguments.token_file or os.environ.get(_TOKEN_FILE)
    if not file:
        raise ConfigError(f"expected the cluster's token with --token-file FILE ({_TOKEN_FILE}), found none")
    return PeerAccess.of(file, arguments.tls_ca, arguments.tls_cert, arguments.tls_key)


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a number from {least} to {most}, found {text!r}")
        return int(text)

    return parse


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            found = str(error) if "literal" not in str(error) and "convert" not in str(error) else "a number"
            raise argparse.ArgumentTypeError(f"expected {found}, found {text!r}") from None

    return parsed
