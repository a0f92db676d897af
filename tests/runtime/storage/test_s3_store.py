"""The S3 protocol against moto's server, and the signature against botocore's."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.errors import (
    ConfigError,
    ForbiddenError,
    MissingPackageError,
    ObjectNotFoundError,
)
from medusa_runtime.storage.base import open_store
from medusa_runtime.storage.retry import RetryPolicy
from medusa_runtime.storage.s3 import S3Store
from medusa_runtime.storage.sigv4 import Credentials, signed
from scripted_server import ScriptedServer
from store_contract import check_ranges_and_versions

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret/key+x"}
BODY = bytes(range(256)) * 1000


def test_ranges_and_versions(moto: str) -> None:
    store = S3Store("s3://bucket/my model/v1", environ={**KEYS, "AWS_ENDPOINT_URL": moto})
    check_ranges_and_versions(store, BODY)
    store.close()
    nowhere = S3Store("s3://buckte/v1", environ={**KEYS, "AWS_ENDPOINT_URL": moto})
    with pytest.raises(ObjectNotFoundError, match=r"s3://buckte/v1/w: no such bucket \(404\)"):
        nowhere.stat("w")
    with pytest.raises(ObjectNotFoundError, match=r"^s3://buckte/v1/model.safetensors: no such bucket \(404\)"):
        open_checkpoint("s3://buckte/v1", store=nowhere)


@pytest.mark.parametrize("token", [None, "session+token=="])
def test_signature_is_botocores(token: str | None) -> None:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials as BotoCredentials

    now = time.time()
    path = "/bucket/my%20model/a%2Bb~c.safetensors"
    ours = signed(
        Credentials(*KEYS.values(), token), region="eu-west-1", host="127.0.0.1:9000", path=path, headers={}, now=now
    )
    request = AWSRequest("GET", f"http://127.0.0.1:9000{path}")
    auth = S3SigV4Auth(BotoCredentials(*KEYS.values(), token), "s3", "eu-west-1")
    auth.add_auth(request)
    theirs = dict(request.headers.items())
    if theirs["X-Amz-Date"] != ours["x-amz-date"]:  # the clock's second passed between the two
        again = time.mktime(time.strptime(theirs["X-Amz-Date"], "%Y%m%dT%H%M%SZ")) - time.timezone
        ours = signed(
            Credentials(*KEYS.values(), token),
            region="eu-west-1",
            host="127.0.0.1:9000",
            path=path,
            headers={},
            now=again,
        )
    assert ours["Authorization"] == theirs["Authorization"]


def checked(origin: Any, environ: dict[str, str]) -> list[str | None]:
    """The Authorization headers that a read of one object sends."""
    origin.put("/bucket/m/w", BODY)
    store = S3Store(
        "s3://bucket/m", environ={"AWS_ENDPOINT_URL": "ignored", "AWS_ENDPOINT_URL_S3": origin.url, **environ}
    )
    assert store.read("w", 0, 10)[0] == BODY[:10]
    store.close()
    return [headers.get("authorization") for _, _, _, headers in origin.requests]


def test_credentials_from_the_environment(origin: Any) -> None:
    (sent,) = checked(origin, {**KEYS, "AWS_REGION": "eu-central-1"})
    assert sent
    assert "AKIDEXAMPLE/" in sent
    assert "/eu-central-1/s3/" in sent


def test_anonymous(origin: Any) -> None:
    assert checked(origin, {**KEYS, "AWS_NO_SIGN_REQUEST": "true"}) == [None]


def test_a_profile(origin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = AKIDLAB\naws_secret_access_key = s\n")
    (tmp_path / "config").write_text("[profile lab]\nregion = ap-south-1\n")
    for name, value in {
        "AWS_PROFILE": "lab",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }.items():
        monkeypatch.setenv(name, value)
    (sent,) = checked(origin, {"AWS_PROFILE": "lab"})
    assert sent
    assert "AKIDLAB/" in sent
    assert "/ap-south-1/s3/" in sent


def test_the_first_request_goes_to_the_endpoint_of_the_profile(
    origin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = ap-south-1\nendpoint_url = {origin.url}\n"
        "aws_access_key_id = AKIDLAB\naws_secret_access_key = s\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    origin.put("/bucket/m/w", BODY)
    store = S3Store("s3://bucket/m", RetryPolicy(unreachable_attempts=1), {"AWS_PROFILE": "lab"})
    assert store.read("w", 0, 10)[0] == BODY[:10]
    store.close()
    ((_, _, _, headers),) = origin.requests
    assert "AKIDLAB/" in headers["authorization"]


class Regional(S3Store):
    """A bucket whose regions are two servers."""

    urls: ClassVar[dict[str | None, str]] = {}

    def _address(self) -> str:
        return f"{self.urls[self._region]}/bucket/m"


def test_requests_that_are_under_way_follow_the_bucket_to_its_region(origin: Any) -> None:
    """All find out about the region, one first: the answers to the others name no region that is news."""
    origin.put("/bucket/m/w", BODY)
    together = threading.Barrier(4)

    def elsewhere(head: bytes) -> bytes:
        together.wait(10)
        return b"HTTP/1.1 301 Moved\r\nx-amz-bucket-region: eu-west-1\r\nContent-Length: 0\r\n\r\n"

    with ScriptedServer(elsewhere) as wrong, ThreadPoolExecutor(together.parties) as pool:
        Regional.urls = {None: wrong.url, "eu-west-1": origin.url}
        store = Regional("s3://bucket/m", environ=KEYS)
        read = [pool.submit(store.read, "w", at, at + 10) for at in range(together.parties)]
        assert [future.result()[0] for future in read] == [BODY[at : at + 10] for at in range(together.parties)]
        store.close()
    assert len(wrong.requests) == together.parties
    assert all("/eu-west-1/s3/" in headers["authorization"] for _, _, _, headers in origin.requests)


def test_without_boto3_a_profile_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "botocore.session", None)
    monkeypatch.setitem(__import__("sys").modules, "botocore", None)
    store = S3Store("s3://bucket/m", environ={"AWS_PROFILE": "lab"})
    with pytest.raises(MissingPackageError, match=r'pip install "medusa-runtime\[s3\]"'):
        store.stat("w")


def test_without_boto3_a_refusal_says_that_no_role_was_looked_for(
    origin: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "botocore.session", None)
    monkeypatch.setitem(__import__("sys").modules, "botocore", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    origin.accept = lambda headers, path: False
    store = S3Store("s3://bucket/m", RetryPolicy(), {"AWS_ENDPOINT_URL": origin.url})
    with pytest.raises(ForbiddenError, match=r'a role is found with boto3 only: pip install "medusa-runtime\[s3\]"'):
        store.stat("w")
    store.close()


def test_a_refusal_says_what_to_do_and_shows_no_secret(origin: Any) -> None:
    origin.accept = lambda headers, path: False
    store = S3Store("s3://bucket/m", RetryPolicy(), {**KEYS, "AWS_ENDPOINT_URL": origin.url})
    with pytest.raises(ForbiddenError, match="AWS_NO_SIGN_REQUEST") as caught:
        store.stat("w")
    assert "s3://bucket/m/w" in str(caught.value)
    assert "boto3" not in str(caught.value)
    assert not any(value in str(caught.value) for value in KEYS.values())
    store.close()


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (400, "ExpiredToken", "the credentials have expired"),
        (403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
        (403, "InvalidObjectState", "the object is archived"),
        (403, "SignatureDoesNotMatch", "the secret key does not belong to the access key"),
    ],
)
def test_a_refusal_names_what_is_wrong_with_the_credentials(status: int, code: str, said: str) -> None:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>…</Message></Error>".encode()
    answer = f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with ScriptedServer(lambda _: answer) as origin:
        store = S3Store("s3://bucket/m", RetryPolicy(), {**KEYS, "AWS_ENDPOINT_URL": origin.url})
        with pytest.raises(ForbiddenError, match=rf"access denied \({status}\), {code}: {said}"):
            store.read("w", 0, 10)
        store.close()


@pytest.mark.parametrize(
    ("url", "environ", "address"),
    [
        ("s3://b/p", {}, ("b.s3.us-east-1.amazonaws.com", "/p/w")),
        ("s3://b", {"AWS_REGION": "eu-west-1"}, ("b.s3.eu-west-1.amazonaws.com", "/w")),
        ("s3://a.b/p", {}, ("s3.us-east-1.amazonaws.com", "/a.b/p/w")),
        ("s3://b/p", {"AWS_REGION": "cn-north-1"}, ("b.s3.cn-north-1.amazonaws.com.cn", "/p/w")),
        ("s3://b/p", {"AWS_ENDPOINT_URL": "https://store.example/x/"}, ("store.example", "/x/b/p/w")),
    ],
)
def test_addresses(url: str, environ: dict[str, str], address: tuple[str, str]) -> None:
    target = S3Store(url, environ=environ).target("w")
    assert (target.endpoint.host, target.path) == address


def test_the_registry_knows_it() -> None:
    assert isinstance(open_store("s3://bucket/m"), S3Store)


def test_an_endpoint_that_is_no_url_is_named_with_its_variable() -> None:
    with pytest.raises(ConfigError, match=r"^AWS_ENDPOINT_URL='127\.0\.0\.1:9000' cannot be used: expected http"):
        S3Store("s3://b/p", environ={"AWS_ENDPOINT_URL": "127.0.0.1:9000"})
    with pytest.raises(ConfigError) as caught:
        S3Store("s3://b/p", environ={"AWS_ENDPOINT_URL": "user:secret@127.0.0.1:9000"})
    assert "secret" not in str(caught.value)
