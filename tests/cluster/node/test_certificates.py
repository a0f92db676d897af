"""Certificates from the cluster's token: nodes with the same one accept each other, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import platform
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession, TCPConnector, web
from medusa_adapters.cli.cluster import connection
from medusa_cluster import connections
from medusa_cluster.node import http_server
from medusa_cluster.node.certificates import held_certificates, write_certificates
from medusa_cluster.node.controller_client import ControllerClient
from medusa_cluster.node.forwarding import Forwarder
from medusa_cluster.node.instances import Instances
from medusa_cluster.node.server import _renew_certificates
from medusa_cluster.node.settings import NodeServerSettings, TlsFiles
from medusa_runtime.errors import ClusterError, ConfigError, NoControllerError
from medusa_runtime.storage.peer_access import PeerAccess
from seccomp import forbid

from benchmarks.ports import free_port

TOKEN = "0123456789abcdef"
MEDUSA = Path(sys.executable).with_name("medusa")


def access(folder: Path, token: str, host: str) -> PeerAccess:
    """Return the credentials of a node that makes its certificates in ``folder``."""
    folder.mkdir()
    path = folder / "token"
    path.touch(0o600)
    path.write_text(token)
    files = TlsFiles.below(folder)
    write_certificates(token, files, host)
    return PeerAccess.of(str(path), str(files.authority), str(files.certificate), str(files.key))


def exchanged(server: PeerAccess, client: PeerAccess) -> bytes:
    """Connect, and return the answer of a server that sends ``yes`` to whoever it accepts. Raises ssl.SSLError."""
    ours, theirs = socket.socketpair()
    listening, connecting = server.server_context(), client.client_context()
    assert listening
    assert connecting

    def serve() -> None:
        with theirs:
            try:
                with listening.wrap_socket(theirs, server_side=True) as connection:
                    connection.sendall(b"yes")
            except (ssl.SSLError, ConnectionError):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours, connecting.wrap_socket(ours) as connection:
            return connection.recv(10)
    finally:
        thread.join()


def test_nodes_with_one_token_accept_each_other(tmp_path: Path) -> None:
    first, second = (access(tmp_path / name, TOKEN, name) for name in ("a.example", "10.1.2.3"))
    assert exchanged(first, second) == b"yes"
    assert exchanged(second, first) == b"yes"
    command = PeerAccess(TOKEN, *(str(held_certificates(TOKEN)[number]) for number in (2, 0, 1)))
    assert exchanged(first, command) == b"yes"


def test_another_token_is_accepted_by_neither_side(tmp_path: Path) -> None:
    node, stranger = access(tmp_path / "a", TOKEN, "10.0.0.1"), access(tmp_path / "b", TOKEN[::-1], "10.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        exchanged(stranger, node)
    # The authority that the stranger expects is one's own to choose: here the node's.
    mixed = replace(stranger, ca_file=node.ca_file)
    received = b""
    with contextlib.suppress(ssl.SSLError, ConnectionError):  # or the end of the connection
        received = exchanged(node, mixed)
    assert received == b""


def test_a_node_has_a_key_of_its_own_that_nobody_else_can_read(tmp_path: Path) -> None:
    keys = []
    for name in ("a", "b"):
        access(tmp_path / name, TOKEN, "10.0.0.1")
        files = TlsFiles.below(tmp_path / name)
        assert [stat.S_IMODE(os.stat(path).st_mode) for path in (*files, files.key.parent)] == [0o600] * 3 + [0o700]
        assert sorted(os.listdir(files.key.parent)) == sorted(path.name for path in files)
        keys.append(files.key.read_bytes())
    assert keys[0] != keys[1]


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
@pytest.mark.parametrize("host", ["10.1.2.3", "fd00::7", "node.example"])
def test_openssl_finds_nothing_wrong(tmp_path: Path, host: str) -> None:
    """By the strict rules, as Ray's library and newer Pythons may, with the names that those look for."""
    access(tmp_path / "a", TOKEN, host)
    access(tmp_path / "b", TOKEN, "other")
    certificate, authority = TlsFiles.below(tmp_path / "a").certificate, TlsFiles.below(tmp_path / "b").authority
    named = "-verify_hostname" if host == "node.example" else "-verify_ip"
    for purpose in ("sslserver", "sslclient"):
        command = [
            "openssl",
            "verify",
            "-x509_strict",
            "-purpose",
            purpose,
            "-CAfile",
            authority,
            named,
            host,
            certificate,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (TOKEN, None, "it closed the connection; if it was started with --tls, this needs --tls, too"),
        (
            None,
            TOKEN,
            "it does not speak TLS, which this node's certificates ask for; expected one token, and --tls on",
        ),
        (TOKEN, TOKEN[::-1], "its certificate is not from the cluster's CA"),
    ],
)
def test_a_node_is_told_why_the_head_does_not_answer(
    tmp_path: Path, theirs: str | None, ours: str | None, said: str
) -> None:
    """Those who join, and commands: a token stands for ``--tls`` with it, None for plain HTTP."""

    def of(name: str, token: str | None) -> PeerAccess:
        found = access(tmp_path / name, token or TOKEN, "127.0.0.1")
        return found if token else PeerAccess(TOKEN)

    server, client = of("a", theirs), of("b", ours)
    scheme = "https" if client.tls else "http"

    async def asked() -> None:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server.server_context()).start()
        host, port = runner.addresses[0][:2]
        settings = NodeServerSettings("n", tmp_path, "127.0.0.1", tmp_path / "token", f"{scheme}://{host}:{port}")
        joining = ControllerClient(settings, client)
        try:
            with pytest.raises(NoControllerError, match=re.escape(said)):
                await joining.call("join", {})
            with pytest.raises(ClusterError, match=re.escape(said)):
                await asyncio.to_thread(connection._ask_network, (host, port), client, "status", {})
        finally:
            await joining.close()
            await runner.cleanup()

    asyncio.run(asked())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the number of memfd_create on x86-64 alone")
def test_a_command_says_that_files_in_memory_are_forbidden(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    try:
        ended = subprocess.run(
            [MEDUSA, "cluster", "status", "--address", "127.0.0.1:1", "--token-file", token, "--tls"],
            preexec_fn=lambda: forbid(319, errno.EPERM),
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    except subprocess.SubprocessError:
        pytest.skip("this kernel takes no seccomp filter")
    assert ended.returncode == 2
    assert ended.stderr.startswith("medusa: --tls: expected that memfd_create is allowed")


def test_a_name_that_no_certificate_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--host: expected an address, or a name in ASCII"):
        access(tmp_path / "n", TOKEN, "nöde.example")


@pytest.mark.parametrize("found", ["open", "link", "dangling", "file", "folder"])
@pytest.mark.parametrize("makes", [True, False])
def test_what_lies_in_the_place_of_the_certificates_is_replaced(tmp_path: Path, found: str, makes: bool) -> None:
    """A folder that others can write, or a link to one: keys would be read, or exchanged, there."""
    folder, elsewhere = tmp_path / "node", tmp_path / "elsewhere"
    tls = TlsFiles.below(folder)
    place = tls.key.parent
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "node.key").write_text("another's")
    token = folder / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    if found in ("open", "folder"):
        (place / "node.key" if found == "folder" else place).mkdir(parents=True)
        place.chmod(0o777)
    elif found == "file":
        place.touch()
    else:
        place.symlink_to(elsewhere if found == "link" else tmp_path / "none")
    settings = NodeServerSettings("n", folder, "127.0.0.1", token, tls=tls if makes else None, makes_certificates=makes)
    _renew_certificates(settings)
    assert [path.name for path in elsewhere.iterdir()] == ["node.key"]
    assert (elsewhere / "node.key").read_text() == "another's"
    assert os.path.lexists(place) == makes
    if makes:
        assert stat.S_IMODE(place.lstat().st_mode) == 0o700
        assert settings.access().tls


def serve(folder: Path, scenario: Callable[[PeerAccess, int], Awaitable[None]]) -> None:
    """Run a node's HTTP server while a scenario uses its port."""
    peer_access = access(folder, TOKEN, "127.0.0.1")
    settings = NodeServerSettings("n", folder, "127.0.0.1", folder / "token", data_port=free_port())

    async def held() -> None:
        line, instances = ControllerClient(settings, peer_access), Instances(settings)
        server = http_server.NodeHttpServer(settings, peer_access, Forwarder(instances), line, ())
        await server.start()
        try:
            await scenario(peer_access, settings.data_port)
        finally:
            await server.close()
            await line.close()

    asyncio.run(held())


async def half_a_handshake(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a client's hello
    return reader, writer


async def healthy(peer_access: PeerAccess, port: int) -> bool:
    """Ask for /healthz in the same breath as the end of the handshake."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=peer_access.client_context())
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200 ")


def test_a_node_says_when_its_certificate_ends(tmp_path: Path) -> None:
    async def scenario(peer_access: PeerAccess, port: int) -> None:
        tls = peer_access.client_context()
        async with ClientSession(f"https://127.0.0.1:{port}", connector=TCPConnector(ssl=tls)) as session:
            async with session.get("/metrics") as refused:
                assert refused.status == 401
            async with session.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                found = (await answer.text()).splitlines()[-1]
        assert found == "medusa_cluster_node_certificate_expiration_timestamp_seconds 253402300799"

    serve(tmp_path / "n", scenario)


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, to make certificates")
@pytest.mark.parametrize("days", [(3, 9, 9, 9), (9, 3, 9, 9), (9, 9, 3, 9), (9, 9, 9, 3)])
def test_the_first_end_of_all_certificates_counts(tmp_path: Path, days: tuple[int, int, int, int]) -> None:
    """Those of the trusted CA, of one between it and the node's, of the node, and of another CA that is trusted."""
    ca, between, node, another = map(str, days)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=tmp_path)

    new = ("-newkey", "rsa:2048", "-nodes", "-subj")
    (tmp_path / "authority").write_text("basicConstraints=critical,CA:true")
    for name, lasts in (("ca", ca), ("another", another)):
        openssl("req", "-x509", *new, f"/CN={name}", "-days", lasts, "-keyout", f"{name}.key", "-out", f"{name}.pem")
    for name, lasts, by, kind in (("between", between, "ca", ("-extfile", "authority")), ("node", node, "between", ())):
        openssl("req", *new, f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-CAcreateserial", "-days", lasts, *kind)
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    for first, second in (("ca", "another"), ("node", "between")):
        with open(tmp_path / f"{first}.pem", "a") as file:
            file.write((tmp_path / f"{second}.pem").read_text())
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    found = PeerAccess.of(str(token), *(str(tmp_path / name) for name in ("ca.pem", "node.pem", "node.key")))
    assert found.expires_at_s == pytest.approx(time.time() + 3 * 86400, abs=600)


def test_a_handshake_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD_S", 0.4)

    async def scenario(peer_access: PeerAccess, port: int) -> None:
        reader, writer = await half_a_handshake(port)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        assert await healthy(peer_access, port)

    serve(tmp_path / "n", scenario)


def test_of_too_many_handshakes_the_oldest_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD_S", 300.0)
    monkeypatch.setattr(connections, "_MOST_WAITING", 40)

    async def scenario(peer_access: PeerAccess, port: int) -> None:
        made = [await half_a_handshake(port) for _ in range(42)]
        for reader, _ in made[:2]:
            assert await asyncio.wait_for(reader.read(), 20) == b""
        assert [await healthy(peer_access, port) for _ in range(20)] == [True] * 20
        assert not made[-1][0].at_eof()
        for _, writer in made:
            writer.close()

    serve(tmp_path / "n", scenario)


@pytest.mark.parametrize("token", [TOKEN, None])
def test_a_node_that_is_not_there_is_said_to_be_so(tmp_path: Path, token: str | None) -> None:
    client = access(tmp_path / "n", TOKEN, "127.0.0.1") if token else PeerAccess(TOKEN)
    scheme = "https" if client.tls else "http"
    settings = NodeServerSettings("n", tmp_path, "127.0.0.1", tmp_path / "token", f"{scheme}://127.0.0.1:9")

    async def asked() -> None:
        joining = ControllerClient(settings, client)
        try:
            with pytest.raises(NoControllerError, match=r": Connect call failed \('127.0.0.1', 9\)$"):
                await joining.ask_head(str(settings.head_url), "join", {"name": "n"})
        finally:
            await joining.close()

    asyncio.run(asked())
