"""A cluster with certificates: Ray, node servers and commands."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import MEDUSA, MODEL, ClusterNode, environment
from medusa_cluster.node.settings import RAY_PORTS
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def _certificates(folder: Path) -> list[str]:
    """The flags that name a cluster's CA, and a certificate for 127.0.0.2 with its key."""

    def openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, cwd=folder)

    new = ("-newkey", "rsa:2048", "-nodes", "-subj")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.2")
    openssl("req", "-x509", *new, "/CN=cluster", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *new, "/CN=node", "-keyout", "node.key", "-out", "node.csr")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "node.csr", *signed, "-out", "node.pem")
    return [
        f"--tls-{name}={folder / file}" for name, file in (("cert", "node.pem"), ("key", "node.key"), ("ca", "ca.pem"))
    ]


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, to make certificates")
def test_a_node_with_certificates_serves_those_who_have_one(tmp_path: Path) -> None:
    flags = _certificates(tmp_path)
    node = ClusterNode("head", 0, flags=flags)
    try:
        node.wait_ready()
        assert f"https://{node.address}" in node.output()
        command = [MEDUSA, "cluster", "status", "--address", node.address, "--token-file", node.token_file]
        asked = subprocess.run([*command, *flags], env=environment(), capture_output=True, text=True, timeout=240)
        assert "1 node\n" in asked.stdout, asked.stderr
        refused = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
        assert refused.returncode == 1
        assert refused.stderr.count("\n") == 1
        assert node.medusa("deploy", "tiny", "--model", str(MODEL), "--min", "1").returncode == 0
        until(lambda: "tiny: 1 of 1 to 1 instances" in node.medusa("status").stdout, node.output)
        assert node.end() == 0
    finally:
        node.close()


def test_nodes_make_certificates_from_the_token(tmp_path: Path) -> None:
    head = ClusterNode("head", 0, flags=["--tls"])
    nodes = [head]
    try:
        head.wait_ready()  # and has made the token
        nodes.insert(0, second := ClusterNode("second", 1, head, flags=["--tls"]).wait_ready())
        assert f"medusa cluster start --address {head.address} --token-file FILE --tls\n" in head.output()
        command = [MEDUSA, "cluster", "status", "--address", second.address, "--token-file", head.token_file]
        asked = _run(*command, "--tls")
        assert "2 nodes\n" in asked.stdout, asked.stderr
        assert _run(*command).returncode == 1
        token_file, wrong = (_token_file(tmp_path / name) for name in ("token", "wrong"))
        token_file.write_text(head.token_file.read_text())
        wrong.write_text(head.token_file.read_text()[::-1])
        assert _run(*command[:-1], wrong, "--tls").returncode == 1
        # A model's weights travel from the head, and the second node serves them.
        assert head.medusa("deploy", "tiny", "--model", str(MODEL), "--min", "2", "--max", "2").returncode == 0
        until(lambda: "tiny: 2 of 2 to 2 instances" in head.medusa("status").stdout, head.output)
        listening = [port for port in range(head.ray_port, head.ray_port + RAY_PORTS) if _is_open(head.host, port)]
        assert head.ray_port in listening
        plain = head.ray_port + 3  # of Ray's agent of runtime environments
        for port in (*listening, head.port):
            if port != plain:
                assert _stranger(head.host, port) == _without_tls(head.host, port) == b""
        assert _without_tls(head.host, plain).startswith(b"HTTP/1.1 401 ")
        # On a node's machine, a gateway finds the node's certificates; elsewhere it makes its own.
        for where in (["--dir", head.folder], ["--address", second.address, "--token-file", token_file, "--tls"]):
            assert _answer_of_a_gateway(*where)["choices"][0]["text"]
        assert [node.end() for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.close()


def _token_file(path: Path) -> Path:
    path.touch(0o600)
    return path


def _answer_of_a_gateway(*where: str | Path) -> Any:
    command = [MEDUSA, "cluster", "gateway", "--host", "127.0.0.1", "--port", "0", *where]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as gateway:
        try:
            assert gateway.stdout
            url = gateway.stdout.readline().split()[-1]
            until(lambda: _is_ready(url))
            body = json.dumps({"model": "tiny", "prompt": "This function", "max_tokens": 4, "temperature": 0})
            with urllib.request.urlopen(f"{url}/metrics", timeout=60) as metrics:
                assert b"medusa_gateway_certificate_expiration_timestamp_seconds 253402300799\n" in metrics.read()
            asked = urllib.request.Request(f"{url}/v1/completions", body.encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=120) as answer:
                return json.load(answer)
        finally:
            gateway.terminate()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}/readyz", timeout=60):
        return True
    return False


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)


def _is_open(host: str, port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, port), timeout=60):
        return True
    return False


def _without_tls(host: str, port: int) -> bytes:
    """What a port says to one who sends a request of plain HTTP, without the token."""
    with contextlib.suppress(ConnectionError), socket.create_connection((host, port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n")
        return connection.recv(100)
    return b""


def _stranger(host: str, port: int) -> bytes:
    """Speak TLS to a port without a certificate, begin as Ray's clients do (HTTP/2), and return the answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection((host, port), timeout=60)
    with contextlib.suppress(OSError), plain, context.wrap_socket(plain) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        return connection.recv(100)
    return b""
