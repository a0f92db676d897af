"""Proxy variables, against a proxy in a process of its own: which are used, for what, and what is sent through it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import ConfigError, ForbiddenError, MissingPackageError, UnreachableError
from medusa_runtime.storage.http import wire
from medusa_runtime.storage.http.endpoint import Endpoint
from medusa_runtime.storage.http.proxy import Proxies
from medusa_runtime.storage.http.store import HttpStore
from medusa_runtime.storage.retry import RetryPolicy
from medusa_runtime.storage.s3 import S3Store

from benchmarks.origin import Origin, Variant

QUICK = RetryPolicy(attempts=2, patience_s=10.0, stall_s=5.0, first_pause_s=0.01)
BODY = os.urandom(3_000_000)


class ProxyProcess:
    """A running proxy and what it has been asked for."""

    def __init__(self, folder: Path, target: int, authorization: str = "") -> None:
        self._log = folder / "proxy.log"
        with self._log.open("wb") as log:
            script = str(Path(__file__).with_name("small_proxy.py"))
            self.process = subprocess.Popen([sys.executable, script, str(target), authorization], stdout=log)
        while not self._log.read_text().endswith("\n"):
            assert self.process.poll() is None
        self.address = f"127.0.0.1:{self._log.read_text().split()[0]}"
        self.url = f"http://{self.address}"

    def asked(self) -> list[str]:
        return self._log.read_text().splitlines()[1:]


@pytest.fixture
def start_proxy(tmp_path: Path) -> Iterator[Callable[..., ProxyProcess]]:
    started: list[ProxyProcess] = []

    def start(*arguments: Any) -> ProxyProcess:
        started.append(ProxyProcess(tmp_path, *arguments))
        return started[-1]

    yield start
    for proxy in started:
        proxy.process.kill()
        proxy.process.wait()


def fetched(store: HttpStore) -> bytes:
    buffer = bytearray(len(BODY))
    try:
        with memoryview(buffer) as view:
            store.read_into("w", 0, view, store.stat("w").version)
    finally:
        store.close()
    return bytes(buffer)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_http_goes_through_the_proxy(start_proxy: Any, origin: Any, variable: str) -> None:
    origin.put("/m/w", BODY)
    proxy = start_proxy(origin.server_port)
    store = HttpStore("http://models.example:8000/m?sig=abc", QUICK, {variable: proxy.url})
    assert fetched(store) == BODY
    assert proxy.asked()[0] == "GET http://models.example:8000/m/w?sig=abc HTTP/1.1"
    headers = origin.requests[0][3]
    assert headers["host"] == "models.example:8000"
    assert "proxy-authorization" not in headers


def test_a_proxy_that_wants_a_password(start_proxy: Any, origin: Any) -> None:
    origin.put("/m/w", BODY)
    proxy = start_proxy(origin.server_port, "Basic dXNlcjpwQHNz")
    named = {"HTTP_PROXY": f"http://user:p%40ss@{proxy.address}", "HTTPS_PROXY": proxy.address}
    assert fetched(HttpStore("http://models.example/m", QUICK, named)) == BODY
    refused = HttpStore("http://models.example/m", QUICK, {"HTTP_PROXY": proxy.url})
    with pytest.raises(ForbiddenError, match=r"407.*HTTP_PROXY=http://user:password@"):
        refused.stat("w")
    refused.close()
    with pytest.raises(UnreachableError, match=r"expected a tunnel, found 407; expected user and password in HTTPS_"):
        HttpStore("https://models.example/m", QUICK, named).stat("w")


def test_s3_goes_through_the_proxy(start_proxy: Any, origin: Any) -> None:
    origin.put("/m/w", BODY)
    proxy = start_proxy(origin.server_port)
    keys = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}
    store = S3Store("s3://m", QUICK, {**keys, "AWS_ENDPOINT_URL": "http://s3.example", "HTTP_PROXY": proxy.url})
    assert fetched(store) == BODY
    assert proxy.asked()[0] == "GET http://s3.example/m/w HTTP/1.1"


def test_https_goes_through_a_tunnel(start_proxy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root/m"
    root.mkdir(parents=True)
    (root / "w").write_bytes(BODY)
    try:
        secure = Origin(tmp_path / "root", tmp_path / "origin", Variant("tls", tls=True), builtin=True).__enter__()
    except MissingPackageError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.ca_file))
    monkeypatch.setattr(wire, "_contexts", [])
    try:
        proxy = start_proxy(int(secure.url.rpartition(":")[2]))
        environ = {"https_proxy": proxy.url, "HTTP_PROXY": "http://nobody.invalid:1"}
        assert fetched(HttpStore("https://127.0.0.1:4433/m", QUICK, environ)) == BODY
        assert proxy.asked() == ["CONNECT 127.0.0.1:4433 HTTP/1.1"]
    finally:
        secure.__exit__(None, None, None)


def test_no_proxy_is_reached_directly(start_proxy: Any, origin: Any) -> None:
    origin.put("/m/w", BODY)
    proxy = start_proxy(origin.server_port)
    assert fetched(HttpStore(f"{origin.url}/m", QUICK, {"HTTP_PROXY": proxy.url, "NO_PROXY": "127.0.0.1"})) == BODY
    assert proxy.asked() == []


def test_a_proxy_that_is_not_there() -> None:
    store = HttpStore("http://models.example/m", QUICK, {"HTTP_PROXY": "http://127.0.0.1:9"})
    with pytest.raises(UnreachableError, match=r"the proxy of HTTP_PROXY, 127\.0\.0\.1:9: Connection refused"):
        store.stat("w")


@pytest.mark.parametrize(
    ("environ", "tls", "host", "proxy"),
    [
        ({"HTTPS_PROXY": "p:1"}, True, "h", "p:1"),
        ({"HTTPS_PROXY": "p:1"}, False, "h", None),
        ({"HTTP_PROXY": "p:1"}, True, "h", None),
        ({"HTTP_PROXY": "p:1", "ALL_PROXY": "q:2"}, True, "h", "q:2"),
        ({"HTTP_PROXY": "p:1", "http_proxy": "q:2"}, False, "h", "q:2"),
        ({"HTTP_PROXY": "p:1", "http_proxy": ""}, False, "h", None),
        ({"HTTP_PROXY": "p:1", "REQUEST_METHOD": "GET"}, False, "h", None),
        ({"HTTPS_PROXY": "http://[::1]:3128"}, True, "h", "[::1]:3128"),
        *(
            ({"ALL_PROXY": "p:1", "NO_PROXY": entries}, True, host, proxy)
            for entries, host, proxy in [
                ("*", "h", None),
                ("a.example, b.example", "b.example", None),
                ("a.example b.example", "b.example", None),
                ("example", "models.example", None),
                (".example", "models.example", None),
                (".example", "example", None),
                ("Example.", "MODELS.example", None),
                ("ample", "models.example", "p:1"),
                ("models.example", "example", "p:1"),
                ("h:443", "h", None),
                ("h:80", "h", "p:1"),
                ("10.0.0.0/8", "10.1.2.3", None),
                ("10.0.0.0/8", "11.1.2.3", "p:1"),
                ("10.0.0.0/8", "h", "p:1"),
                ("10.0.0.0/99", "10.1.2.3", "p:1"),
                ("[::1]:443,::2", "::1", None),
                ("[::1]:443,fd00::/8", "fd00::2", None),
                (",", "h", "p:1"),
            ]
        ),
    ],
)
def test_which_proxy_is_chosen(environ: dict[str, str], tls: bool, host: str, proxy: str | None) -> None:
    chosen = Proxies(environ).choose(Endpoint(tls, host, 443 if tls else 80))
    assert (chosen and f"{chosen.endpoint.authority}") == proxy


@pytest.mark.parametrize(
    "value", ["socks5://p:1", "https://p:1", "http://p:x", "http://[p", "http://user:secret@", "a b"]
)
def test_a_proxy_that_cannot_be_used(value: str) -> None:
    with pytest.raises(ConfigError, match=r"HTTPS_PROXY=.*expected http://") as caught:
        HttpStore("https://h/m", QUICK, {"HTTPS_PROXY": value}).stat("w")
    assert "secret" not in str(caught.value)
