"""How a command reaches the cluster: through any node server, over the network or over its control socket."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import ssl
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ClusterError, ConfigError, NoControllerError, UnauthorizedError, from_code

_ANSWERS_WITHIN_S = 60.0


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the cluster is."""
    parser.add_argument(
        "--address",
        metavar="HOST[:PORT]",
        default=os.environ.get("MEDUSA_CLUSTER_ADDRESS"),
        help="any node server of the cluster; default: the one of this machine [MEDUSA_CLUSTER_ADDRESS]",
    )
    parser.add_argument("--dir", type=Path, metavar="PATH", help="folder of this machine's node server")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="with --address: the cluster's token")
    for name, text in (("cert", "our certificate"), ("key", "its key"), ("ca", "who signed the nodes' own")):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help=f"with --address: {text}; PEM")


def ask(arguments: argparse.Namespace, operation: str, given: dict[str, Any]) -> Any:
    """Call an operation of the controller and return its result. Raises the error that it answered."""
    from medusa_cluster.node.settings import default_folder, read_token

    folder = (arguments.dir or default_folder()).absolute()
    if arguments.address is None:
        return _ask_socket(folder / "control.sock", operation, given)
    token = read_token((arguments.token_file or folder / "token").absolute())
    return _ask_network(arguments, token, operation, given)


def _ask_socket(path: Path, operation: str, given: dict[str, Any]) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWERS_WITHIN_S)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps({"op": "cluster", "call": operation, "arguments": given}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
        except OSError as error:
            raise ClusterError(
                f"no node server answers at {path} ({error.strerror or error}); name one with --address HOST:PORT, or "
                "its folder with --dir"
            ) from None
    return _result(line, str(path))


def _ask_network(arguments: argparse.Namespace, token: str, operation: str, given: dict[str, Any]) -> Any:
    from .start import head_address, tls_files

    host, port = head_address(arguments.address)
    tls = tls_files(arguments)
    connection: http.client.HTTPConnection
    if tls is None:
        connection = http.client.HTTPConnection(host, port, timeout=_ANSWERS_WITHIN_S)
    else:
        context = ssl.create_default_context(cafile=str(tls.authority))
        context.load_cert_chain(tls.certificate, tls.key)
        connection = http.client.HTTPSConnection(host, port, timeout=_ANSWERS_WITHIN_S, context=context)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", f"/cluster/{operation}", json.dumps(given), headers)
        answer = connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"the node server at {host}:{port} cannot be reached: {error}") from None
    finally:
        connection.close()
    return _result(answer, f"{host}:{port}")


def _result(answer: bytes, where: str) -> Any:
    try:
        found = json.loads(answer)
        if "ok" in found:
            return found["ok"]
        error = from_code(str(found["error"]["code"]), str(found["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        raise ClusterError(f"{where} is no node server: expected JSON, found {answer[:100]!r}") from None
    if isinstance(error, UnauthorizedError):
        raise ConfigError(f"{where} refused the token; expected the one of the head's token file, see --token-file")
    if isinstance(error, NoControllerError):
        raise NoControllerError(f"{error}; running instances go on meanwhile")
    raise error
