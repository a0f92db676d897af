"""gs:// against moto's server, whose objects are read as those of Cloud Storage's XML API, and metadata servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from medusa_runtime.errors import ConfigError, ForbiddenError, ObjectNotFoundError, StorageError
from medusa_runtime.storage.base import open_store
from medusa_runtime.storage.google_cloud import GoogleCloudStore, MetadataServer
from medusa_runtime.storage.retry import RetryPolicy
from scripted_server import ScriptedServer
from store_contract import check_ranges_and_versions

BODY = bytes(range(256)) * 1000
NOBODY = {"NO_GCE_CHECK": "true", "CLOUDSDK_CONFIG": "/nowhere"}
QUICK = RetryPolicy(attempts=2, unreachable_attempts=2, first_pause_s=0.0)


def answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def token_answer(token: str, seconds: float = 3599) -> bytes:
    body = json.dumps({"access_token": token, "expires_in": seconds, "token_type": "Bearer"}).encode()
    return answer("200 OK", body, Metadata_Flavor="Google", Content_Type="application/json")


@pytest.fixture
def google(origin: Any) -> Any:
    """An origin in place of Google's, with one object."""
    origin.put("/bucket/m/w", BODY)
    return origin


@pytest.fixture
def open_bucket(google: Any) -> Iterator[Callable[..., GoogleCloudStore]]:
    opened: list[GoogleCloudStore] = []

    def open_bucket(url: str = "gs://bucket/m", **environ: str) -> GoogleCloudStore:
        store = GoogleCloudStore(
            url, QUICK, {"CLOUDSDK_CONFIG": "/nowhere", "STORAGE_EMULATOR_HOST": google.url} | environ
        )
        opened.append(store)
        return store

    yield open_bucket
    for store in opened:
        store.close()


def authorizations(google: Any) -> list[str | None]:
    return [headers.get("authorization") for _, _, _, headers in google.requests]


def on_a_machine_of_google(store: GoogleCloudStore, server: str) -> GoogleCloudStore:
    """An emulator needs no token, so none is looked for. Here one stands for Google's own address."""
    store._environ = {name: value for name, value in store._environ.items() if name != "STORAGE_EMULATOR_HOST"}
    store._environ |= {"GCE_METADATA_HOST": server}
    return store


def test_ranges_and_versions(moto: str) -> None:
    """moto reads no token. An emulator's address may lack the scheme."""
    environ = {"STORAGE_EMULATOR_HOST": moto.removeprefix("http://"), "CLOUDSDK_CONFIG": "/nowhere"}
    store = GoogleCloudStore("gs://bucket/my model/v1", QUICK, environ)
    check_ranges_and_versions(store, BODY)
    store.close()
    nowhere = GoogleCloudStore("gs://buckte/v1", QUICK, environ)
    with pytest.raises(ObjectNotFoundError, match=r"gs://buckte/v1/w: no such bucket \(404\)"):
        nowhere.stat("w")
    nowhere.close()


def test_the_machines_service_account(google: Any, open_bucket: Callable[..., GoogleCloudStore]) -> None:
    with ScriptedServer(lambda head: token_answer("ya29.machine")) as metadata:
        store = on_a_machine_of_google(open_bucket(), metadata.url.removeprefix("http://"))
        assert store.read("w", 0, 10)[0] == BODY[:10]
        assert store.read("w", 10, 20)[0] == BODY[10:20]
    assert authorizations(google) == ["Bearer ya29.machine"] * 2
    (asked,) = metadata.requests
    assert asked.startswith(b"GET /computeMetadata/v1/instance/service-accounts/default/token HTTP/1.1\r\n")
    assert b"Metadata-Flavor: Google" in asked


@pytest.mark.parametrize(
    "reply",
    [
        answer("404 Not Found", b"no account", Metadata_Flavor="Google"),
        answer("200 OK", b"<html>"),  # another cloud's
        answer("404 Not Found", b"<html>"),
        answer("503 Busy", b""),
        answer("401 Unauthorized", b""),
        answer("200 OK", b'{"access_token": "a\\r\\nX: b", "expires_in": 9}', Metadata_Flavor="Google"),
        answer("200 OK", b"[" * 60_000, Metadata_Flavor="Google"),
        answer("200 OK", b'{"access_token": "x"}', Metadata_Flavor="Google"),
        b"220 ftp\r\n\r\n",
    ],
)
def test_without_a_service_account_requests_are_anonymous(
    google: Any, open_bucket: Callable[..., GoogleCloudStore], reply: bytes
) -> None:
    with ScriptedServer(lambda head: reply) as metadata:
        store = on_a_machine_of_google(open_bucket(), metadata.url.removeprefix("http://"))
        assert store.read("w", 0, 10)[0] == BODY[:10]
    assert authorizations(google) == [None]


def test_a_pods_metadata_server_that_is_about_to_start_is_asked_again(
    google: Any, open_bucket: Callable[..., GoogleCloudStore]
) -> None:
    metadata = ScriptedServer(lambda head: token_answer("ya29.pod"))
    address, refused = metadata.url.removeprefix("http://"), "127.0.0.1:1"
    store = on_a_machine_of_google(open_bucket(), refused)
    assert store.read("w", 0, 10)[0], "on a laptop, nothing there means that there is none"
    pod = on_a_machine_of_google(open_bucket(), refused)
    pod._environ = {**pod._environ, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    with pytest.raises(StorageError, match=r"metadata server 127.0.0.1:1 .*refused.* \(tried 2 times\)"):
        pod.read("w", 0, 10)
    with metadata:
        pod._environ = {**pod._environ, "GCE_METADATA_HOST": address}
        pod.read("w", 0, 10)
    assert authorizations(google) == [None, "Bearer ya29.pod"]


def test_a_token_without_the_servers_name_is_one(google: Any, open_bucket: Callable[..., GoogleCloudStore]) -> None:
    """Some metadata servers of GKE send their name with other answers only."""
    reply = answer("200 OK", b'{"access_token": "ya29.pod", "expires_in": 3599, "token_type": "Bearer"}')
    with ScriptedServer(lambda head: reply) as metadata:
        store = on_a_machine_of_google(open_bucket(), metadata.url.removeprefix("http://"))
        assert store.read("w", 0, 10)[0] == BODY[:10]
    assert authorizations(google) == ["Bearer ya29.pod"]


def test_tokens_are_renewed_before_they_expire() -> None:
    given = iter(
        [token_answer("first", 225.5), token_answer("second", 3600), answer("500 Oh", Metadata_Flavor="Google")]
    )
    with ScriptedServer(lambda head: next(given)) as server:
        metadata = MetadataServer(server.url.removeprefix("http://"))
        assert metadata.token() == metadata.token() == "first"
        time.sleep(0.6)
        assert metadata.token() == "second"
        metadata._expires_at = time.monotonic() + 100
        assert metadata.token() == "second", "it is still valid, and no other is to be had"
        assert len(server.requests) == 3


@pytest.mark.parametrize("status", ["429 Too Many", "500 Oh", "503 Busy"])
def test_a_metadata_server_that_is_busy_is_asked_again(
    google: Any, open_bucket: Callable[..., GoogleCloudStore], status: str
) -> None:
    given = iter([answer(status, Metadata_Flavor="Google"), token_answer("ya29.machine")])
    with ScriptedServer(lambda head: next(given)) as metadata:
        store = on_a_machine_of_google(open_bucket(), metadata.url.removeprefix("http://"))
        assert store.read("w", 0, 10)[0] == BODY[:10]
    assert authorizations(google) == ["Bearer ya29.machine"]


def test_a_denial_says_why_there_was_no_token(open_bucket: Callable[..., GoogleCloudStore]) -> None:
    denial = answer("401 Unauthorized", b"<Error><Code>AccessDenied</Code></Error>")
    unbound = answer("403 Forbidden", b"Unable to generate access token\n  <x>", Metadata_Flavor="Google")
    with ScriptedServer(lambda head: denial) as google, ScriptedServer(lambda head: unbound) as metadata:
        store = open_bucket(STORAGE_EMULATOR_HOST=google.url)
        with pytest.raises(ForbiddenError, match=r"metadata server \S+ answers 403 .Unable to generate access token"):
            on_a_machine_of_google(store, metadata.url.removeprefix("http://")).stat("w")


def test_an_object_that_is_stored_compressed_is_named(open_bucket: Callable[..., GoogleCloudStore]) -> None:
    """Google decompresses it then, and sends all of it without a length, whatever range is asked for."""
    whole = (
        b'HTTP/1.1 200 OK\r\nETag: W/"1"\r\nx-goog-stored-content-encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n'
        b"8\r\n01234567\r\n0\r\n\r\n"
    )
    with ScriptedServer(lambda head: whole) as google:
        store = open_bucket(STORAGE_EMULATOR_HOST=google.url)
        assert store.read("w", 0, 100)[0] == b"01234567", "a small file is read"
        for read in (lambda: store.stat("w"), lambda: store.read_into("w", 0, memoryview(bytearray(4)), 'W/"1"')):
            with pytest.raises(StorageError, match=r"stored with Content-Encoding: gzip.* upload it without"):
                read()


@pytest.fixture
def key_file(tmp_path: Path) -> Callable[[str], Path]:
    pytest.importorskip("google.auth.transport.requests")
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    from cryptography.hazmat.primitives import serialization as form

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()).decode()

    def write(token_url: str) -> Path:
        account = {
            "type": "service_account", "project_id": "p", "private_key_id": "1", "private_key": pem,
            "client_email": "medusa@p.iam.gserviceaccount.com", "client_id": "1", "token_uri": token_url,
        }  # fmt: skip
        (tmp_path / "key.json").write_text(json.dumps(account))
        return tmp_path / "key.json"

    return write


def test_a_key_file_is_googles_librarys_to_read(
    google: Any, open_bucket: Callable[..., GoogleCloudStore], key_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedServer(lambda head: token_answer("ya29.key")) as server:
        file = str(key_file(f"{server.url}/token"))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", file)
        store = open_bucket(GOOGLE_APPLICATION_CREDENTIALS=file)
        threads = [threading.Thread(target=store.read, args=("w", 0, 10)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert authorizations(google) == ["Bearer ya29.key"] * 4
    (asked,) = server.requests
    assert parse_qs(asked.partition(b"\r\n\r\n")[2].decode()) or b"POST /token" in asked


def test_credentials_that_cannot_be_used_are_one_error(
    open_bucket: Callable[..., GoogleCloudStore], tmp_path: Path, key_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for file, words in ((tmp_path / "bad.json", "no credentials"), (tmp_path / "none.json", "no credentials")):
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        with pytest.raises(ForbiddenError, match=words):
            open_bucket(GOOGLE_APPLICATION_CREDENTIALS=str(file)).stat("w")
    with ScriptedServer(lambda head: answer("400 Bad Request", b'{"error": "invalid_grant"}')) as server:
        file = key_file(f"{server.url}/token")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        with pytest.raises(ForbiddenError, match=r"credentials cannot be refreshed: .*invalid_grant"):
            open_bucket(GOOGLE_APPLICATION_CREDENTIALS=str(file)).stat("w")


def test_a_token_goes_to_no_other_host(open_bucket: Callable[..., GoogleCloudStore]) -> None:
    with (
        ScriptedServer(lambda head: token_answer("ya29.machine")) as metadata,
        ScriptedServer(lambda head: answer("206 Partial", b"0", Content_Range="bytes 0-0/1", ETag='"1"')) as other,
        ScriptedServer(lambda head: answer("302 Found", Location=f"{other.url}/w")) as google,
    ):
        store = open_bucket(STORAGE_EMULATOR_HOST=google.url)
        assert on_a_machine_of_google(store, metadata.url.removeprefix("http://")).stat("w").size == 1
        assert b"Bearer ya29.machine" in google.requests[0]
        assert b"ya29" not in other.requests[0]


def test_a_denial_says_what_is_expected(open_bucket: Callable[..., GoogleCloudStore]) -> None:
    denial = answer("401 Unauthorized", b"<Error><Code>AccessDenied</Code><Details>a@b lacks it</Details></Error>")
    with (
        ScriptedServer(lambda head: denial) as google,
        pytest.raises(ForbiddenError, match=r"AccessDenied a@b lacks it.*GOOGLE_APPLICATION_CREDENTIALS"),
    ):
        open_bucket(STORAGE_EMULATOR_HOST=google.url).stat("w")


@pytest.mark.parametrize(
    ("url", "environ", "words"),
    [
        ("gs://", {}, "found no bucket"),
        ("gs:///m", {}, "found no bucket"),
        ("gs://b/m", {"STORAGE_EMULATOR_HOST": "http://"}, "STORAGE_EMULATOR_HOST='http://' cannot be used"),
        ("gs://b/m", {"GCE_METADATA_HOST": "a b"}, "GCE_METADATA_HOST='a b' cannot be used"),
    ],
)
def test_bad_addresses(url: str, environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GoogleCloudStore(url, QUICK, {"CLOUDSDK_CONFIG": "/nowhere"} | environ).stat("w")


def test_the_address_of_an_object() -> None:
    store = open_store("gcs://bucket/my model/")
    assert isinstance(store, GoogleCloudStore)
    target = store.target("a+b.json")
    assert (target.endpoint.authority, target.path) == ("storage.googleapis.com", "/bucket/my%20model/a%2Bb.json")
