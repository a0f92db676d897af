"""Fixtures for the tests of `medusa deploy`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest


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
