"""`medusa cluster gateway`: the entrance of a cluster."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from medusa_runtime.config import ACCESS_LOGS, TRACES, positive, seconds

from ..flags import add_log_format, chosen, log_settings
from .connection import access, add_connection, ask
from .start import bracketed, head_address, require_extra

logger = logging.getLogger(__name__)

_CLIENT_TOKEN_FILE = "MEDUSA_CLIENT_TOKEN_FILE"
_ANSWER_MEMORY = "default: a quarter of what is available, at most 1024"
_WRITE_TIMEOUT = "how long an answer may wait for its client, beside a second for each 256 kB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=8080, metavar="N", help="port to bind; 0 takes a free one")
    parser.add_argument("--host", default="0.0.0.0", metavar="ADDRESS", help="address to bind")
    parser.add_argument(
        "--client-token-file",
        metavar="FILE",
        default=os.environ.get(_CLIENT_TOKEN_FILE),
        help=f"secret that requests must bear; default: none [{_CLIENT_TOKEN_FILE}]",
    )
    add_connection(parser)
    parser.add_argument("--drain-s", **_number(seconds, 30.0, "how long running requests may go on after SIGTERM"))
    add_settings(parser)
    add_log_format(parser)
    parser.add_argument("--name", default="", help="the gateway's name in the status; default: host and process id")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are not about where the gateway runs: limits of requests, and the access log."""
    for name, parse, default, text in (
        ("max-waiting", positive, 2048, "requests that may wait; more get 429"),
        ("max-body-mb", positive, 32, "largest request body"),
        ("answer-memory-mb", positive, None, f"memory for answers that are held, all together; {_ANSWER_MEMORY}"),
        ("hold-s", seconds, 600.0, "how long a request waits for an instance"),
        ("write-timeout-s", seconds, 60.0, _WRITE_TIMEOUT),
    ):
        parser.add_argument(f"--{name}", **_number(parse, default, text))
    parser.add_argument(
        "--access-log",
        choices=ACCESS_LOGS,
        help="a line on stderr for each answered request; default: off [MEDUSA_ACCESS_LOG]",
    )
    parser.add_argument(
        "--traces",
        choices=TRACES,
        help="otlp: a span for each request, and for its waits and runs; default: off [MEDUSA_TRACES]",
    )


def _number(parse: Callable[[str], Any], default: float | None, text: str) -> dict[str, Any]:
    return {"type": _parsed(parse), "default": default, "metavar": "N", "help": text}


def run(arguments: argparse.Namespace) -> int:
    require_extra(["aiohttp"])
    from medusa_cluster.gateway.gateway import GatewayOptions
    from medusa_cluster.gateway.process import run as serve
    from medusa_runtime.logs import configure_logging
    from medusa_runtime.spans import check_installed
    from medusa_runtime.storage.peer_access import read_token

    level, log_format = log_settings(arguments, os.environ)
    configure_logging(level, log_format)
    traces = chosen(arguments, "traces", os.environ) or "off"
    if traces != "off":
        check_installed()
    options = GatewayOptions(
        addresses=_addresses(arguments),
        access=access(arguments),
        host=arguments.host,
        port=arguments.port,
        client_token=read_token(arguments.client_token_file) if arguments.client_token_file else None,
        max_waiting=arguments.max_waiting,
        hold_s=arguments.hold_s,
        drain_s=arguments.drain_s,
        max_body_mb=arguments.max_body_mb,
        answer_memory_mb=arguments.answer_memory_mb,
        write_timeout_s=arguments.write_timeout_s,
        name=arguments.name,
        access_log=chosen(arguments, "access_log", os.environ) or "off",
        traces=traces,
    )
    say = logger.info if log_format == "json" else partial(print, flush=True)
    return serve(options, lambda url: say(f"listening on {url}"))


def _addresses(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the node servers to ask: those given, or all that this machine's own one knows."""
    if arguments.address is None:
        return tuple(str(node["address"]) for node in ask(arguments, "status", {})["nodes"])
    given = tuple(part.strip() for part in arguments.address.split(",") if part.strip())
    return tuple(f"{bracketed(host)}:{port}" for host, port in map(head_address, given))


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > 65535:
        found = text if len(text) <= 20 else f"{text[:20]}…"
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, found {found!r}")
    return int(text)


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            found = str(error) if "literal" not in str(error) and "convert" not in str(error) else "a number"
            raise argparse.ArgumentTypeError(f"expected {found}, found {text!r}") from None

    return parsed
