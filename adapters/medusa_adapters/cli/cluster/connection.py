"""How a command reaches the cluster: through any node server, over the network or over its control socket."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import ClusterError, NoControllerError, UnauthorizedError, from_code

from .start import add_tls, head_address, require_extra, tls_files

if TYPE_CHECKING:
    from medusa_cluster.node.settings import TlsFiles
    from medusa_runtime.storage.peer_access import PeerAccess

DIR_VARIABLE = "MEDUSA_CLUSTER_DIR"
_ANSWERS_WITHIN_S = 60.0


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the cluster is."""
    parser.add_argument(
        "--address",
        metavar="HOST[:PORT]",
        default=os.environ.get("MEDUSA_CLUSTER_ADDRESS"),
        help="any node server of the cluster; default: the one of this machine [MEDUSA_CLUSTER_ADDRESS]",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="PATH",
        default=os.environ.get(DIR_VARIABLE),
        help=f"folder of this machine's node server [{DIR_VARIABLE}]",
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="with --address: the cluster's token")
    add_tls(parser, "with --address: our certificate", "who signed the nodes' own", "with --address: nodes have --tls")


def ask(arguments: argparse.Namespace, operation: str, given: dict[str, Any]) -> Any:
    """Call an operation of the controller and return its result. Raises the error that it answered."""
    if arguments.address is None:
        return _ask_socket(_folder(arguments) / "control.sock", operation, given)
    return _ask_network(head_address(arguments.address), access(arguments), operation, given)


def access(arguments: argparse.Namespace) -> PeerAccess:
    """Return the token and the certificates that the flags of ``add_connection`` name.

    A node on this machine that has made certificates has them for commands, too. Raises ConfigError or
    MissingPackageError.
    """
    from medusa_runtime.storage.peer_access import PeerAccess

    token_file = str((arguments.token_file or _folder(arguments) / "token").absolute())
    tls = tls_files(arguments) or _made_certificates(arguments, token_file)
    return PeerAccess.of(token_file, *(() if tls is None else tls.for_access()))


def _made_certificates(arguments: argparse.Namespace, token_file: str) -> TlsFiles | None:
    from medusa_cluster.node.settings import TlsFiles
    from medusa_runtime.storage.peer_access import read_token

    own = TlsFiles.below(_folder(arguments))
    if arguments.address is None and own.key.exists():
        return own
    if not arguments.tls:
        return None
    require_extra(["cryptography"])
    from medusa_cluster.node.certificates import held_certificates

    return held_certificates(read_token(token_file))


def _folder(arguments: argparse.Namespace) -> Path:
    from medusa_cluster.node.settings import check_own, default_folder

    if arguments.dir is not None:
        return Path(arguments.dir).absolute()
    folder = default_folder()
    if os.path.lexists(folder):
        check_own(folder)
    return folder


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


def _ask_network(address: tuple[str, int], peer_access: PeerAccess, operation: str, given: dict[str, Any]) -> Any:
    from medusa_runtime.storage.peer_access import call_failure

    host, port = address
    connection: http.client.HTTPConnection
    context = peer_access.client_context()
    if context is None:
        connection = http.client.HTTPConnection(host, port, timeout=_ANSWERS_WITHIN_S)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=_ANSWERS_WITHIN_S, context=context)
    headers = {"Authorization": f"Bearer {peer_access.token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", f"/cluster/{operation}", json.dumps(given), headers)
        response = connection.getresponse()
        answer = response.read()
    except (OSError, http.client.HTTPException) as error:
        reason = call_failure(error, tls=peer_access.tls)
        raise ClusterError(f"the node server at {host}:{port} cannot be reached: {reason}") from None
    finally:
        connection.close()
    if response.status == 401:
        raise UnauthorizedError(f"{host}:{port} refused the token; expected the head's, see --token-file")
    return _result(answer, f"{host}:{port}")


def _result(answer: bytes, where: str) -> Any:
    try:
        found = json.loads(answer)
        if "ok" in found:
            return found["ok"]
        code, message = str(found["error"]["code"]), str(found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise ClusterError(f"{where} is no node server: expected JSON, found {answer[:100]!r}") from None
    if "." not in code:
        text = "but perhaps a gateway: expected the port that a node was started with as --data-port"
        raise ClusterError(f"{where} is no node server, {text}; it answered: {message[:200]}")
    error = from_code(code, message)
    if isinstance(error, NoControllerError):
        raise NoControllerError(f"{error}; running instances go on meanwhile")
    raise error
