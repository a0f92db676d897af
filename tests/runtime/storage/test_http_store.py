"""Ranges over a real socket from a server that misbehaves in every way we know."""

from __future__ import annotations

import os
import re
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificates
from medusa_runtime.errors import (
    ConfigError,
    ForbiddenError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    UnreachableError,
)
from medusa_runtime.storage.http import wire
from medusa_runtime.storage.http.fields import retry_after_s
from medusa_runtime.storage.http.store import HttpStore
from medusa_runtime.storage.retry import RetryLog, RetryPolicy
from scripted_server import ScriptedServer

QUICK = RetryPolicy(attempts=4, patience_s=10.0, stall_s=1.0, first_pause_s=0.01)
BODY = os.urandom(8_000_000)


@pytest.fixture
def store(origin: Any) -> Any:
    origin.put("/m/w", BODY)
    store = HttpStore(origin.url + "/m", QUICK)
    yield store
    store.close()


def fetched(store: HttpStore, start: int = 0, stop: int = len(BODY), version: str | None = None) -> bytes:
    buffer = bytearray(stop - start)
    with memoryview(buffer) as view:
        store.read_into("w", start, view, version)
    return bytes(buffer)


def test_ranges_over_one_kept_connection(store: HttpStore, origin: Any) -> None:
    version = store.stat("w").version
    assert store.stat("w").size == len(BODY)
    assert fetched(store, 10, 2_000_000, version) == BODY[10:2_000_000]
    assert store.read("w", len(BODY) - 10, len(BODY) + 1_000_000) == (BODY[-10:], store.stat("w"))
    assert origin.requests[-1][3]["accept-encoding"] == "identity"
    assert len(store._pool._idle[store._home.endpoint]) == 1


@pytest.mark.parametrize(
    "faults",
    [
        ["cut:1000000"],
        ["cut:0"],
        ["short:70000", "short:5"],
        ["500", "503", "429"],
        ["stall"],
        ["shift"],
        ["garbage"],
        ["short:1000"] * 12,  # more often than it is tried without progress
        ["cut:900000", "503", "stall", "cut:1"],
    ],
)
def test_faults_are_retried_from_the_failed_byte(store: HttpStore, origin: Any, faults: list[str]) -> None:
    version = store.stat("w").version
    origin.requests.clear()
    origin.faults["/m/w"] = list(faults)
    assert fetched(store, version=version) == BODY
    assert origin.faults["/m/w"] == []
    if faults[0] == "cut:1000000":
        assert origin.asked("/m/w") == [(0, len(BODY)), (1_000_000, len(BODY))]
    assert all(headers["if-match"] == version for _, _, _, headers in origin.requests)


def test_retries_are_counted_and_one_in_ten_seconds_is_logged(
    store: HttpStore, origin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, counted = RetryLog(), []
    log.on_retry = lambda: counted.append(1)
    monkeypatch.setattr("medusa_runtime.storage.retry.RETRIES", log)
    origin.faults["/m/w"] = ["500", "503", "429"]
    fetched(store)
    assert len(counted) == 3
    assert [record.message for record in caplog.records] == [f"{store.url}/w: the server answers 500; trying again"]


def test_progress_is_told_as_it_arrives(store: HttpStore, origin: Any) -> None:
    origin.faults["/m/w"] = ["cut:1000000"]
    seen: list[int] = []
    with memoryview(bytearray(len(BODY))) as view:
        store.read_into("w", 0, view, None, seen.append)
    assert seen == sorted(seen)
    assert len(seen) > 5
    assert seen[-1] == len(BODY)


def test_retry_after_is_honoured(store: HttpStore, origin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("medusa_runtime.storage.retry.time.sleep", pauses.append)
    monkeypatch.setattr("medusa_runtime.storage.retry.RetryState.__init__.__defaults__", (pauses.append,))
    origin.retry_after, origin.faults["/m/w"] = "1", ["429"]
    assert fetched(store) == BODY
    assert pauses == [1.0]


def test_a_date_to_retry_after_is_by_the_clock_of_the_server() -> None:
    until, answered = "Sun, 06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:30 GMT"
    assert retry_after_s(until, answered, 0.0) == 7.0
    assert retry_after_s(until, "", 784111770.0) == 7.0, "by ours, if the server has none"
    assert retry_after_s("soon", answered, 0.0) is None


def test_a_server_that_asks_for_more_patience_than_there_is(store: HttpStore, origin: Any) -> None:
    origin.retry_after, origin.faults["/m/w"] = "3600", ["503"]
    with pytest.raises(StorageError, match=r"answers 503 \(tried once; the server asks to wait 3,600 s\)"):
        fetched(store)


def test_a_server_that_never_recovers(store: HttpStore, origin: Any) -> None:
    origin.faults["/m/w"] = ["500"] * 50
    with pytest.raises(StorageError, match=r"answers 500 \(tried 4 times\)"):
        fetched(store)
    assert len(origin.faults["/m/w"]) == 46


def test_an_object_that_changes_is_no_mixture(store: HttpStore, origin: Any) -> None:
    version = store.stat("w").version
    origin.faults["/m/w"] = ["cut:1000"]
    origin.put("/m/w", BODY[::-1])
    with pytest.raises(ObjectChangedError, match="changed while it was read"):
        fetched(store, version=version)


def test_ranges_without_a_validator_are_not_put_together(store: HttpStore, origin: Any) -> None:
    """A replacement of the same size would go unseen, so only what one answer holds is read."""
    origin.etags = False
    assert store.read("w", 0, 1000)[0] == BODY[:1000]
    assert fetched(store) == BODY
    with pytest.raises(StorageError, match="neither ETag nor Last-Modified"):
        fetched(store, version=store.stat("w").version)
    origin.faults["/m/w"] = ["cut:1000000", "replace"]
    with pytest.raises(StorageError, match="neither ETag nor Last-Modified"):
        fetched(store)


def test_an_object_replaced_between_two_tries(store: HttpStore, origin: Any) -> None:
    version = store.stat("w").version
    origin.faults["/m/w"] = ["cut:1000", "replace"]
    with pytest.raises(ObjectChangedError):
        fetched(store, version=version)


def test_a_server_without_ranges(store: HttpStore, origin: Any) -> None:
    origin.faults["/m/w"] = ["full", "full"]
    assert store.read("w", 5, 10)[0] == BODY[5:10]
    with pytest.raises(StorageError, match="expected 206 and a range, found 200"):
        fetched(store, 100, 200)


def test_refusals(store: HttpStore, origin: Any) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"/m/nothing: no such object \(404\)"):
        store.stat("nothing")
    origin.faults["/m/w"] = ["403"]
    with pytest.raises(ForbiddenError, match="403"):
        store.stat("w")


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"cannot reach 127.0.0.1 port {port}: Connection refused"):
        HttpStore(f"http://127.0.0.1:{port}/m", QUICK).stat("w")


@pytest.mark.parametrize("named", ["", "nowhere.pem", "other.pem"])
def test_a_certificate_of_an_unknown_authority_says_where_one_is_named(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python silently ignores an SSL_CERT_FILE that is not there."""
    _, certificate, key = make_certificates(tmp_path)
    (tmp_path / "other.pem").write_bytes(b"")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setattr(wire, "_contexts", [ssl.create_default_context()])
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    said = "belongs in the file that SSL_CERT_FILE names"
    if named:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / named))
        said += f", which is '{tmp_path / named}'" + (" and cannot be read" if named == "nowhere.pem" else "")
    with (
        ScriptedServer(lambda request: b"", context=context) as server,
        pytest.raises(UnreachableError, match=re.escape(f"{said} (tried ")),
    ):
        HttpStore(f"{server.url}/m", QUICK).stat("w")


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(UnreachableError, match="DNS"):
        HttpStore("http://no-such-host.invalid/m", QUICK).stat("w")


def test_redirects_are_followed_once_and_found_again_when_they_expire(store: HttpStore, origin: Any) -> None:
    origin.put("/cdn/w", BODY)
    origin.redirects["/m/w"] = "/cdn/w?signature=secret"
    assert fetched(store, 0, 100) == BODY[:100]
    assert fetched(store, 100, 200) == BODY[100:200]
    assert [path for path, *_ in origin.requests] == ["/m/w", "/cdn/w", "/cdn/w"]
    origin.faults["/cdn/w"] = ["403"]
    assert fetched(store, 200, 300) == BODY[200:300]


def test_all_who_find_a_redirect_expired_ask_for_it_again() -> None:
    expired, refused = threading.Event(), threading.Barrier(2)

    def network(head: bytes) -> bytes:
        if b"/old" in head and expired.is_set():
            refused.wait(60)  # both readers have been refused before one of them asks again
            return b"HTTP/1.1 403 Expired\r\nContent-Length: 0\r\n\r\n"
        return b'HTTP/1.1 206 P\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/9\r\nETag: "1"\r\n\r\n0'

    def home(head: bytes) -> bytes:
        time.sleep(0.5 if expired.is_set() else 0)
        place = f"{content.url}/{'new' if expired.is_set() else 'old'}"
        return f"HTTP/1.1 302 F\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()

    with ScriptedServer(network) as content, ScriptedServer(home) as origin, ThreadPoolExecutor(2) as readers:
        store = HttpStore(origin.url, QUICK)
        assert store.read("w", 0, 1)[0] == b"0"
        expired.set()
        assert [each.result()[0] for each in [readers.submit(store.read, "w", 0, 1) for _ in range(2)]] == [b"0", b"0"]
        store.close()


def test_what_a_redirect_leads_to_is_refused_once() -> None:
    denied = b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"
    moved = b"HTTP/1.1 302 F\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n"
    with ScriptedServer(lambda head: denied if b"/other" in head else moved) as origin:
        store = HttpStore(origin.url, QUICK)
        with pytest.raises(ForbiddenError, match=r"access denied \(403\)"):
            store.read("w", 0, 1)
        store.close()


@pytest.mark.parametrize("allowed", [True, False])
def test_redirects_to_other_hosts_are_followed_where_that_is_allowed(origin: Any, allowed: bool) -> None:
    origin.put("/m/w", BODY)
    origin.put("/cdn/w", BODY)
    elsewhere = origin.url.replace("127.0.0.1", "localhost")
    asked: list[str] = []

    def allows(url: str) -> bool:
        asked.append(url)
        return allowed

    store = HttpStore(f"{origin.url}/m", QUICK, {})
    store.limit_redirects(allows)
    origin.redirects["/m/w"] = "/cdn/w"
    assert fetched(store, 0, 10) == BODY[:10]
    assert not asked, "its own host"
    store.close()
    origin.requests.clear()
    store = HttpStore(f"{origin.url}/m", QUICK, {})
    store.limit_redirects(allows)
    origin.redirects["/m/w"] = f"{elsewhere}/cdn/w?signature=secret"
    if allowed:
        assert fetched(store, 0, 10) == BODY[:10]
    else:
        with pytest.raises(ForbiddenError, match=r"redirected to http://localhost:\d+/cdn/w; expected its own host"):
            fetched(store, 0, 10)
        assert [path for path, *_ in origin.requests] == ["/m/w"]
    assert asked == [f"{elsewhere}/cdn/w?signature=secret"]
    store.close()


def test_credentials_are_sent_and_never_shown(origin: Any) -> None:
    origin.put("/m/w", BODY)
    origin.accept = lambda headers, path: (
        headers.get("authorization") == "Basic dXNlcjpwQHNz" and path.endswith("?sig=abc")
    )
    store = HttpStore(origin.url.replace("//", "//user:p%40ss@") + "/m?sig=abc", QUICK)
    assert fetched(store, 0, 10) == BODY[:10]
    with pytest.raises(ObjectNotFoundError) as caught:
        store.stat("nothing")
    assert not any(secret in str(caught.value) for secret in ("p%40ss", "p@ss", "abc", "user"))
    store.close()


def test_an_empty_object(store: HttpStore, origin: Any) -> None:
    origin.put("/m/empty", b"")
    assert store.read("empty", 0, 100)[0] == b""
    assert store.stat("empty").size == 0


def test_a_url_that_is_none() -> None:
    with pytest.raises(ConfigError, match="expected http"):
        HttpStore("http://host:port/m")


@pytest.mark.parametrize("fault", ["stall", "silent"])
def test_a_read_is_interrupted(origin: Any, fault: str) -> None:
    """By its thread; what the same thread reads next is read."""
    origin.put("/m/w", BODY)
    origin.faults["/m/w"] = [fault]
    store = HttpStore(origin.url + "/m", RetryPolicy(stall_s=600.0))
    errors, ended, results = [], threading.Event(), []

    def read() -> None:
        try:
            fetched(store)
        except StorageError as error:
            errors.append(str(error))
        ended.wait()
        results.append(fetched(store))

    thread = threading.Thread(target=read)
    thread.start()
    while not origin.hanging:
        time.sleep(0.01)
    store.interrupt(threading.get_ident())
    assert origin.hanging
    while not errors:
        assert not origin.gave_up, "the origin gave up before the reader"
        store.interrupt(thread.ident or 0)
        time.sleep(0.01)
    ended.set()
    thread.join(60)
    assert "interrupted" in errors[0]
    assert results == [BODY]
    store.close()
