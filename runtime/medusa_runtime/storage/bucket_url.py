"""The addresses of buckets: s3://bucket/prefix, gs://bucket/prefix and az://container/prefix."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import ConfigError
from .base import redacted

_BUCKET = r"[A-Za-z0-9._:-]+"  # wider than a cloud's own rules: Ceph has tenant:bucket, and old buckets capitals
_CONTROL = re.compile("[\x00-\x1f\x7f]")


class BucketUrl(NamedTuple):
    """A bucket, the part of its objects' names in front of a key, and what the URL has behind an ``@``."""

    bucket: str
    prefix: str
    host: str = ""


def parse_bucket_url(url: str, form: str, *, kind: str = "bucket", names: str = _BUCKET) -> BucketUrl:
    """Parse a URL of the ``form``. Raises ConfigError if what stands in place of the bucket matches no name.

    ``kind`` is what the service calls a bucket. Nothing is decoded: a prefix is the names' own text.
    """
    shown = redacted(url)
    authority, _, path = url.partition("://")[2].partition("/")
    if not authority:
        raise ConfigError(f"{shown}: expected {form}, found no {kind}")
    if "?" in url or "#" in url:
        raise ConfigError(
            f"{shown}: expected {form}, found ? or #, which mean nothing there; a signature belongs in a variable, "
            "such as AZURE_STORAGE_SAS_TOKEN"
        )
    if _CONTROL.search(url):
        raise ConfigError(f"{shown}: expected {form}, found a control character, such as the end of a line")
    bucket, _, host = authority.partition("@") if kind == "container" else (authority, "", "")
    if not re.fullmatch(names, bucket) or bucket.startswith("arn:"):
        hint = "; an access point is read by its alias" if bucket.startswith("arn:") else ""
        found = f"…@{bucket.rpartition('@')[2]}" if "@" in bucket else bucket
        raise ConfigError(f"{shown}: expected {form}, found '{found}' in place of the {kind}{hint}")
    return BucketUrl(bucket, path.strip("/"), host)
