"""What stands in s3://, gs:// and az:// addresses."""

from __future__ import annotations

import pytest
from medusa_runtime.errors import ConfigError
from medusa_runtime.storage.base import open_store

SIGNATURE = "sv=2021-12-02&sig=secret"


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "lab")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://bucket/c#/m", r"gs://bucket/c.*expected gs://bucket/prefix, found \? or #"),
        ("s3://bucket/m?versionId=1", r"expected s3://bucket/prefix, found \? or #"),
        (f"az://models/m?{SIGNATURE}", r"expected az://container/prefix, found \? or #.*AZURE_STORAGE_SAS_TOKEN"),
        ("s3://buck et/m", "expected s3://bucket/prefix, found 'buck et' in place of the bucket"),
        ("gs://user@bucket/m", "found '…@bucket' in place of the bucket"),
        ("gs://[bucket/m", r"found '\[bucket' in place of the bucket"),
        ("s3://key:secret@bucket/m", r"found '…@bucket' in place of the bucket"),
        ("s3://arn:aws:s3:us-east-1:123456789012:accesspoint/my", "an access point is read by its alias"),
        ("az://lab.blob.core.windows.net/models/m", "found 'lab.blob.core.windows.net' in place of the container"),
        ("az://Models/m", "found 'Models' in place of the container"),
        ("az://m[@lab.dfs.core.windows.net/m", r"found 'm\[' in place of the container"),
        ("gs://bucket/a\nb", "found a control character"),
        ("s3://", "found no bucket"),
        ("az:///m", "found no container"),
    ],
)
def test_what_names_no_place_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("s3://tenant:bucket.name/m", "/tenant:bucket.name/m/w"),
        ("gs://Old_Bucket.example.com/ü 100%+/", "/Old_Bucket.example.com/%C3%BC%20100%25%2B/w"),
        ("az://$web/m", "/%24web/m/w"),
        ("az://models", "/models/w"),
    ],
)
def test_names_that_stores_have(url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = open_store(url)
    assert store.target("w").path == path  # type: ignore[attr-defined]
    store.close()
