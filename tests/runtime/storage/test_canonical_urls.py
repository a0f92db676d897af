"""One spelling for each place, and what lies below a prefix."""

from __future__ import annotations

import pytest
from medusa_runtime.errors import UnreachableError
from medusa_runtime.storage.base import open_store
from medusa_runtime.storage.canonical_urls import canonical_url, is_below


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("HTTPS://Host:443/te%61m/", "https://host/team"),
        ("http://Host:8080/a%2fb", "http://host:8080/a%2Fb"),
        ("http://user@Host/m", "http://user@host/m"),
        ("S3://Bucket/M/", "s3://Bucket/M"),
        ("s3://bucket", "s3://bucket"),
        ("abfs://Container@account/m", "abfs://Container@account/m"),
        ("file:///a%20b/", "/a b"),
        ("/a/../b/", "/b"),
        ("//a", "/a"),
        ("/", "/"),
    ],
)
def test_one_spelling(url: str, place: str) -> None:
    assert canonical_url(url) == place
    assert canonical_url(place) == place


@pytest.mark.parametrize(
    "url",
    [
        "models/m", "~/m", "", "s3://", "https://", "http://h/../x", "http://h/%2e%2E/x", "http://h//x", "http://h/./x",
        "http://h\\@evil/x", "s3://b::local:///etc", "http://[", "http://h:x/m",
    ],
)  # fmt: skip
def test_what_may_lead_elsewhere_has_none(url: str) -> None:
    assert canonical_url(url) is None
    assert not is_below("https://host/m", url)


@pytest.mark.parametrize(
    ("place", "prefix", "below"),
    [
        ("https://host/team/m", "HTTPS://HOST:443/te%61m/", True),
        ("https://host/team", "https://host/team/", True),
        ("https://host/team-b/m", "https://host/team", False),
        ("https://host.evil/team/m", "https://host", False),
        ("https://host/m", "http://host", False),
        ("https://host:8443/m", "https://host", False),
        ("s3://b/x", "s3://b", True),
        ("/models/m", "file:///models/", True),
        ("/models/m", "/", True),
        ("/models-b", "/models", False),
    ],
)
def test_below(place: str, prefix: str, below: bool) -> None:
    assert is_below(place, prefix) is below


def test_a_file_system_that_connects_at_once_and_cannot() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(UnreachableError, match=r"^ftp://127\.0\.0\.1:9/m: cannot be reached: Connection refused$"):
        open_store("ftp://127.0.0.1:9/m")
