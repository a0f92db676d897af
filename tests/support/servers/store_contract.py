"""Checks that hold for every store of objects: its ranges and versions."""

from __future__ import annotations

import pytest
from medusa_runtime.errors import ObjectChangedError, ObjectNotFoundError
from medusa_runtime.storage.base import Store


def check_ranges_and_versions(store: Store, body: bytes) -> None:
    """Read from a store whose object ``w`` has this body, and which has no object ``nothing``."""
    info = store.stat("w")
    assert info.size == len(body)
    buffer = bytearray(1000)
    with memoryview(buffer) as view:
        store.read_into("w", 300, view, info.version)
    assert buffer == body[300:1300]
    with pytest.raises(ObjectChangedError), memoryview(buffer) as view:
        store.read_into("w", 0, view, '"another"')
    with pytest.raises(ObjectNotFoundError, match=f"{store.url}/nothing: no such object"):
        store.stat("nothing")
