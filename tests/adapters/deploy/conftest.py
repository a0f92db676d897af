"""Fixtures for the tests of `medusa deploy`: AWS' control planes, by moto."""

from __future__ import annotations

import functools
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from deploying import AWS_KEYS


@pytest.fixture(scope="package", autouse=True)
def service_models_read_once() -> Iterator[None]:
    """Each session of boto3's, and so each command, would parse megabytes of JSON again."""
    from botocore.loaders import JSONFileLoader

    original, loader = JSONFileLoader.load_file, JSONFileLoader()

    @functools.cache
    def read(path: str) -> Any:
        return original(loader, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: read(path))
        yield


@pytest.fixture(scope="package")
def moto_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    yield "http://{}:{}".format(*moto.get_host_and_port())
    moto.stop()


@pytest.fixture
def empty_aws(moto_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead boto3, here and in the command, to control planes that have nothing yet."""
    for name, value in {**AWS_KEYS, "AWS_ENDPOINT_URL": moto_server}.items():
        monkeypatch.setenv(name, value)
    reset = urllib.request.Request(f"{moto_server}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset, timeout=240).close()
