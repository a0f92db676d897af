"""A peer that sends anything: the bytes with their checksums or one StorageError, and no leak."""

from __future__ import annotations

import os
import shutil
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import make_certificates
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_runtime.errors import (
    ConfigError,
    ForbiddenError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    UnreachableError,
    WrongBytesError,
)
from medusa_runtime.storage.framing import (
    Frame,
    FramingError,
    checksum_of_index,
    framed_bytes,
    import_xxh3_64,
    pack_index,
    parse_index,
)
from medusa_runtime.storage.peer import Chunk, PeerStore
from medusa_runtime.storage.peer_access import PeerAccess, read_token
from scripted_server import ScriptedServer

SIZES = (300, 300, 100)
CHUNKS = [os.urandom(size) for size in SIZES]
DATA = b"".join(CHUNKS)
ACCESS = PeerAccess("0123456789abcdef")


def frames() -> bytes:
    """The body for all chunks."""
    checksum = import_xxh3_64()
    return b"".join(part for chunk in CHUNKS for part in (Frame(len(chunk), checksum(chunk)).pack(), chunk))


def answer(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    announced = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {announced}\r\n\r\n".encode() + body


def read(server: ScriptedServer, access: PeerAccess = ACCESS) -> tuple[bytes, list[Chunk]]:
    store = PeerStore(server.url, "s3://bucket/model", access, access.client_context())
    buffer, arrived = bytearray(len(DATA)), list[Chunk]()
    try:
        store.read_chunks("model.safetensors", 64, memoryview(buffer), '"v"', arrived.append, chunk_bytes=SIZES[0])
    finally:
        store.close()
    return bytes(buffer), arrived


def test_each_chunk_arrives_with_its_checksum() -> None:
    with ScriptedServer(lambda _: answer(frames())) as server:
        data, arrived = read(server)
    assert data == DATA
    assert [(chunk.size, chunk.filled) for chunk in arrived] == [(300, 300), (300, 600), (100, 700)]
    assert [chunk.checksum for chunk in arrived] == list(map(import_xxh3_64(), CHUNKS))
    head = server.requests[0].decode()
    assert head.startswith("GET /regions/s3%3A%2F%2Fbucket%2Fmodel/shards/model.safetensors?start=64&stop=764 HTTP/1.1")
    assert "Authorization: Bearer 0123456789abcdef" in head
    assert 'If-Match: "%22v%22"' in head


def test_a_silence_within_a_chunk_loses_no_bytes_over_tls(tmp_path: Path) -> None:
    ca, cert, key = map(str, make_certificates(tmp_path))
    access = PeerAccess(ACCESS.token, ca, cert, key)

    def slowly(head: bytes) -> Iterator[bytes]:
        if b"/progress " in head:
            yield answer(b'{"state": "fetching", "fetched_bytes": 300}')
            return
        yield answer(b"", length=framed_bytes(3, len(DATA)))
        yield frames()[:100]  # a record of its own, which ends within the first chunk
        time.sleep(1.6)
        yield frames()[100:]

    with ScriptedServer(slowly, context=access.server_context()) as server:
        data, _ = read(server, access)
    assert b"/progress " in server.requests[1], "the peer was not silent for long enough to be asked"
    assert data == DATA


@pytest.mark.parametrize("number", ["Infinity", "1e999", "NaN", '"x"', "null", "[]"])
def test_progress_that_is_no_number_is_an_error_of_the_peer(number: str) -> None:
    body = f'{{"state": "fetching", "fetched_bytes": {number}}}'.encode()
    with ScriptedServer(lambda _: answer(body)) as server:
        store = PeerStore(server.url, "s3://bucket/model", ACCESS, None)
        with pytest.raises(StorageError, match="expected a region's progress"):
            store.progress()
        store.close()


@pytest.mark.parametrize("cut", [0, 10, 40, 48, 100, 348, 747])
def test_what_is_cut_off_is_an_error_and_what_came_before_stays(cut: int) -> None:
    body = answer(frames()[:cut], length=framed_bytes(3, len(DATA)))
    with ScriptedServer(lambda _: body) as server, pytest.raises(StorageError) as raised:
        read(server)
    assert not isinstance(raised.value, WrongBytesError)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("404 no", ObjectNotFoundError),
        ("412 no", ObjectChangedError),
        ("401 no", ForbiddenError),
        ("403 no", ForbiddenError),
        ("500 no", StorageError),
        ("301 no", StorageError),
        ("204 no", StorageError),
    ],
)
def test_refusals_have_their_own_errors(status: str, kind: type[StorageError]) -> None:
    with ScriptedServer(lambda _: answer(b"", status)) as server, pytest.raises(kind):
        read(server)


def test_nobody_there_is_unreachable() -> None:
    with pytest.raises(UnreachableError):
        PeerStore("http://127.0.0.1:1", "s3://bucket/model", ACCESS, None).read_index()


def test_a_flipped_bit_is_found() -> None:
    body = bytearray(frames())
    body[-1] ^= 1
    with ScriptedServer(lambda _: answer(bytes(body))) as server, pytest.raises(WrongBytesError, match="checksum"):
        read(server)


def test_any_answer_is_the_right_bytes_or_an_error() -> None:
    now = [b""]

    def check(body: bytes) -> None:
        now[0] = body
        try:
            data, _ = read(server)
        except StorageError:
            return
        assert data == DATA

    right = [answer(frames()), answer(frames(), length=10)]
    inputs = st.binary(max_size=200).map(lambda tail: right[0][:60] + tail)
    with ScriptedServer(lambda _: now[0]) as server:
        fuzz(inputs, check, right)


def test_any_index_is_parsed_or_refused() -> None:
    right = pack_index(b'{"format": 1}', {"config.json": b"{}", "tokenizer.json": b"x" * 50})

    def check(data: bytes) -> None:
        try:
            text, files = parse_index(data)
        except FramingError:
            return
        assert len(text) + sum(map(len, files.values())) < len(data)

    fuzz(st.binary(max_size=100), check, [right])
    assert parse_index(right) == (b'{"format": 1}', {"config.json": b"{}", "tokenizer.json": b"x" * 50})


def test_the_checksum_of_an_index_is_of_all_names_and_bodies() -> None:
    one = checksum_of_index(b"index", {"a": b"1", "b": b"2"})
    assert one == checksum_of_index(b"index", {"b": b"2", "a": b"1", ".medusa/kv-plan": b"of this machine"})
    assert len({one, *(checksum_of_index(b"index", {"a": a, "b": b}) for a, b in [(b"", b"12"), (b"12", b"")])}) == 3


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert read_token(str(file)) == "0123456789abcdef"
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="only user"):
            read_token(str(file))
    file.chmod(0o600)
    for text in ("", "short", "0123456789 abcdef", "é" * 20, "x" * 5000):
        file.write_text(text)
        with pytest.raises(ConfigError, match="token of at least"):
            read_token(str(file))
    with pytest.raises(ConfigError, match="no file"):
        read_token(str(tmp_path / "none"))


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, to make certificates")
def test_a_certificate_that_nodes_would_not_accept_is_refused_at_the_start(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    folders = [tmp_path / name for name in ("good", "old", "other")]
    for folder in folders:
        folder.mkdir()
    (ca, cert, key), old, (other_ca, *_) = (
        make_certificates(folder, days) for folder, days in zip(folders, (2, -1, 2), strict=True)
    )
    PeerAccess.of(str(token), str(ca), str(cert), str(key))
    with pytest.raises(
        ConfigError, match=r"node\.pem: expected a certificate of .*found another one: certificate has exp"
    ):
        PeerAccess.of(str(token), *map(str, old))
    with pytest.raises(ConfigError, match=r"node\.pem: expected a certificate of .*found another one: "):
        PeerAccess.of(str(token), str(other_ca), str(cert), str(key))


def test_certificates_come_together(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert PeerAccess.of(str(file)).server_context() is None
    with pytest.raises(ConfigError, match="all of the cluster's CA"):
        PeerAccess.of(str(file), ca_file=str(file))
    with pytest.raises(ConfigError, match="PEM"):
        PeerAccess.of(str(file), str(file), str(file), str(file))
    with pytest.raises(ConfigError, match="expected http://"):
        PeerStore("https://127.0.0.1:1", "s3://bucket/model", ACCESS, None)
    with pytest.raises(ConfigError, match="expected https://"):
        PeerStore("http://127.0.0.1:1", "s3://bucket/model", ACCESS, ssl.create_default_context())
