"""A server of S3's protocol for the tests of stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

MOTO_BODY = bytes(range(256)) * 1000


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """Yield the URL of moto's server, which has one object."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    import boto3

    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys)
    client.create_bucket(Bucket="bucket", ACL="public-read-write")
    client.put_object(Bucket="bucket", Key="my model/v1/w", Body=MOTO_BODY, ACL="public-read")
    client.close()
    yield f"http://{host}:{port}"
    server.stop()
